"""What the measurements share: an emulated cluster, processes that take turns, models."""

import sys
from pathlib import Path

# Dynamo imports by name what it has inlined, so examples are modules here as they are there.
sys.path.append(str(Path(__file__).parents[2] / "examples"))
