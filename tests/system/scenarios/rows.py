"""All rows by name, so that worker processes can be told which one to run."""

from tests.system.scenarios.architectures import ARCHITECTURES
from tests.system.scenarios.loops import LOOPS
from tests.system.scenarios.modes import MODES
from tests.system.scenarios.regions import REGIONS

TABLES = (ARCHITECTURES, MODES, LOOPS, REGIONS)
SCENARIOS = {name: scenario for table in TABLES for name, scenario in table.items()}

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
