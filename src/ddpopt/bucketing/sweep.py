"""Scaling efficiency over world sizes and bandwidths, and which buckets are best where."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ddpopt._text import table
from ddpopt.bucketing.costs import Network
from ddpopt.bucketing.merging import buckets_of_caps
from ddpopt.bucketing.plan import DDP_DEFAULT_CAPS, BucketPlan, plan_buckets
from ddpopt.bucketing.simulate import Stragglers, simulate
from ddpopt.errors import PlanError

# As tc(8) of Linux names them: powers of 1000, in bits.
_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SAME = 1e-4  # of efficiency: plans closer than this are equally good


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Efficiencies on one cluster: of the saved plan, DDP's default buckets, a plan made for it.

    `num_buckets` are those of the plan made for it.
    """

    world_size: int
    bytes_per_s: float
    saved: float
    default: float
    replanned: float
    num_buckets: int

    @property
    def best(self) -> str:
        """The best of the three, the one that asks for least where they are equally good."""
        efficiency = {"saved": self.saved, "default": self.default, "replanned": self.replanned}
        enough = max(efficiency.values()) - _SAME
        return next(name for name, value in efficiency.items() if value >= enough)


def sweep(
    plan: BucketPlan,
    world_sizes: Sequence[int],
    bandwidths: Sequence[float],
    network: Network,
    stragglers: Stragglers | None = None,
) -> list[Cell]:
    """Return a cell for each world size and each bandwidth of `network`'s nodes in bytes/s.

    Plans are made without regard to stragglers.

    Raises:
        PlanError: a world size or a bandwidth is out of range.
    """
    default = dataclasses.replace(plan, sizes=buckets_of_caps(plan.profile, DDP_DEFAULT_CAPS))
    cells = []
    for world_size in world_sizes:
        for bytes_per_s in bandwidths:
            links = dataclasses.replace(network, bytes_per_s=bytes_per_s)
            replanned = plan_buckets(plan.profile, links.allreduce(world_size), world_size)
            saved_is, default_is, replanned_is = (
                simulate(
                    each, world_size=world_size, network=links, stragglers=stragglers
                ).efficiency
                for each in (plan, default, replanned)
            )
            cells.append(
                Cell(
                    world_size=world_size,
                    bytes_per_s=bytes_per_s,
                    saved=saved_is,
                    default=default_is,
                    replanned=replanned_is,
                    num_buckets=len(replanned.buckets),
                )
            )
    return cells


def render(cells: Sequence[Cell]) -> str:
    """Return the cells as a table."""
    header = ("ranks", "bandwidth", "saved", "default", "replanned", "buckets", "best")
    rows = [
        (
            f"{cell.world_size}",
            format_bandwidth(cell.bytes_per_s),
            *(f"{efficiency:.1%}" for efficiency in (cell.saved, cell.default, cell.replanned)),
            f"{cell.num_buckets}",
            cell.best,
        )
        for cell in cells
    ]
    return "\n".join(table(header, rows))


def parse_bandwidth(text: str) -> float:
    """Return bytes per second of a rate such as `10gbit`, written as for `tc`.

    Units are bit, kbit, mbit, gbit and tbit. A bare number, and tc's units in bytes (`bps`, which
    elsewhere are bits), are refused.

    Raises:
        PlanError: the text is no such rate, or it is 0.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]+)", text.strip(), re.IGNORECASE)
    scale = _BITS_PER_S.get(found[2].lower()) if found else None
    if found is None or scale is None or not float(found[1]):
        raise PlanError(
            f"the bandwidth is {text!r}; give a number above 0 and one of the units "
            f"{', '.join(_BITS_PER_S)} (bits per second), such as 10gbit"
        )
    return float(found[1]) * scale / 8


def format_bandwidth(bytes_per_s: float) -> str:
    """Return a rate in the largest unit of which it is 1 or more."""
    bits_per_s = bytes_per_s * 8
    fitting = [unit for unit, scale in _BITS_PER_S.items() if bits_per_s >= scale]
    unit = fitting[-1] if fitting else "bit"
    return f"{bits_per_s / _BITS_PER_S[unit]:g}{unit}"
