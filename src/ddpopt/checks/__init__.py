"""Before a long run: steps on a copy (`copies`), compiling them ahead, comparing with eager."""

from ddpopt.checks.verify import Verification

__all__ = ["Verification"]
