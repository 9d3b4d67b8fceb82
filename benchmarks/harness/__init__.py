"""What the measurements share: an emulated cluster, processes that take turns, models."""

import sys
from pathlib import Path

# Dynamo imports the modules of functions that it has inlined by their names, so the examples have
# to be found under theirs, `train_gpt` and `slow_link`, as when they run as programs.
sys.path.append(str(Path(__file__).parents[2] / "examples"))
