"""Inspection of what was decided. The core never imports this package."""

from ddpopt.inspection.explain import Explanation
from ddpopt.inspection.recording import Recording
from ddpopt.inspection.traces import merge_traces

__all__ = ["Explanation", "Recording", "merge_traces"]
