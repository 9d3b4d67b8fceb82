"""Which options to train with, by how long a model's allreduces take compared to its computation.

docs/index.md has the same three rows, with what was measured for each; the limits are taken from
benchmarks/RESULTS.md, from its columns "compute alone" and "communication alone".
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ddpopt.cli.output import Table
from ddpopt.planning.costs import AllreduceCost

_BUCKET_MIB = 25  # DDP's default cap


class Choice(NamedTuple):
    """What to write if computation takes at least `least` times as long as allreduces.

    `seen` says that in words.
    """

    least: float
    seen: str
    write: str
    why: str


CHOICES = (
    Choice(4, "4 times as long or longer", "no options", "other buckets have won nothing"),
    Choice(
        1,
        "1 to 4 times as long",
        'options={"buckets": "auto"}',
        "allreduces can be hidden; it depends on their buckets how far",
    ),
    Choice(
        0,
        "shorter",
        'buckets="auto", or an algorithm',
        "the network is the limit: hide it behind forward too (ShardedUpdate), or send less",
    ),
)


def communication_s(cost: AllreduceCost, gradients_mib: float) -> float:
    """Return how long the allreduces of one step take, with DDP's default buckets."""
    num_buckets = math.ceil(gradients_mib / _BUCKET_MIB)
    return num_buckets * cost.startup_s + gradients_mib * cost.s_per_mib


def choices_table(taken_s: float | None) -> Table:
    """Return the rows, in milliseconds if the time of a step's allreduces is known."""
    if taken_s is None:
        seen = [choice.seen for choice in CHOICES]
    else:
        high, low = (f"{choice.least * taken_s * 1e3:.3g}" for choice in CHOICES[:2])
        seen = [f"{high} ms or longer", f"{low} to {high} ms", f"shorter than {low} ms"]
    header = ("an iteration's computation is", "give torch.compile", "since")
    rows = [(what, choice.write, choice.why) for what, choice in zip(seen, CHOICES, strict=True)]
    return Table(header=header, rows=rows)


def choices_data(taken_s: float | None) -> list[dict[str, Any]]:
    rows = []
    for choice in CHOICES:
        least_ms = None if taken_s is None else choice.least * taken_s * 1e3
        rows.append({"computation_at_least_ms": least_ms, "write": choice.write})
    return rows
