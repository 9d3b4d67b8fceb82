"""Cases that once failed, by what was wrong, and the outcome that is right now."""

from __future__ import annotations

from fuzzing.spec import Block, Case

KEPT: dict[str, Case] = {
    "rows of a sparse gradient, which DDP divides, were read by a later section": Case(
        blocks=(Block(kind="parallel", inner=(Block(kind="embedding", choice=1),)),),
        find_unused=True,
    ),
}
