"""All rows by name, so that worker processes can be told which one to run."""

from tests.support.device import DEVICE
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
    "last short batch",
    "in-place operators",
    "mutated inputs",
    "autocast",
    "backward twice (retain_graph)",
)

# Of these the C++ takes up to a minute.
_SLOW = ("autocast", "dynamic batch")
# On the CPU, where each takes ten seconds: strides that Inductor chooses, and buffers it reuses.
_IN_FORWARD = ("conv and batch norm", "in-place operators")


def names_of(inner: str, split: str) -> tuple[str, ...]:
    """Return the rows that run with an inner compiler and a split."""
    if inner != "inductor":
        return tuple(SCENARIOS)
    if DEVICE.type != "cpu":
        return ON_INDUCTOR
    if split == "forward":
        return _IN_FORWARD
    return tuple(name for name in ON_INDUCTOR if name not in _SLOW)
