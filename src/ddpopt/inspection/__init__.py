"""Inspection of what was decided. The core never imports this package."""

from ddpopt.inspection.explanation import Explanation
from ddpopt.inspection.recording import Recording

__all__ = ["Explanation", "Recording"]
