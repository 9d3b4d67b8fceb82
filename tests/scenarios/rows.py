"""All rows by name, so that worker processes can be told which one to run."""

from scenarios.architectures import ARCHITECTURES
from scenarios.loops import LOOPS
from scenarios.modes import MODES
from scenarios.regions import REGIONS

SCENARIOS = {**ARCHITECTURES, **MODES, **LOOPS, **REGIONS}

# Rows in which Inductor does what aot_eager does not: fuse, choose strides, reuse buffers.
ON_INDUCTOR = (
    "transformer",
    "conv and batch norm",
    "channels_last",
    "dynamic batch",
    "in-place operators",
    "mutated inputs",
    "autocast",
    "backward twice (retain_graph)",
)
