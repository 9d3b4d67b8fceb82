"""What is done before a long run, on copies of the model.

`copies.py` makes the copy and steps it. `warmup.py` compiles ahead with one such step. `verify.py`
compares compiled steps with eager ones, by what `comparison.py` measures; `first_step.py` does so
by itself where `config.verify` is set.
"""

from ddpopt.checks.verify import Verification

__all__ = ["Verification"]
