"""Cases that once failed, by what was wrong, and the outcome that is right now."""

from __future__ import annotations

from fuzzing.spec import Block, Case

KEPT: dict[str, Case] = {
    # Aliases that order the first step's gradients made zeros of none.
    "zeros for parameters without a gradient": Case(
        blocks=(Block(kind="detached"),), static_graph=True, split="forward"
    ),
}
