"""Cases that once failed, by what was wrong, and the outcome that is right now."""

from __future__ import annotations

from tests.system.fuzzing.spec import Block, Case

KEPT: dict[str, Case] = {
    # Aliases that order the first step's gradients made zeros of none.
    "zeros for parameters without a gradient": Case(
        blocks=(Block(kind="detached"),), static_graph=True, split="forward"
    ),
    # The recomputation of a checkpoint was compiled anew, and whole.
    "a guard that fails in a recomputation": Case(
        blocks=(Block(kind="choose"),), find_unused=True, regions="checkpoint", split="forward"
    ),
    "a guard that fails in a recomputation, split in backward": Case(
        blocks=(Block(kind="choose"),), find_unused=True, regions="checkpoint"
    ),
    # A section's fake run was counted as a part of the checkpoint's forward.
    "compiled uncompiled in a checkpoint": Case(
        blocks=(Block(kind="linear"), Block(kind="linear")),
        regions="checkpoint",
        split="forward",
        inner="eager",
    ),
    # What the Reducer reduces was read off what requires gradients now.
    "all frozen after DDP rebuilt its buckets": Case(
        blocks=(Block(kind="linear"),), batches=((3,),) * 4, freezes=("", "", "", "all")
    ),
    "thawed after DDP was made": Case(
        blocks=(Block(kind="linear", frozen="all"), Block(kind="linear")),
        batches=((3,),) * 4,
        freezes=("", "", "", "thawed"),
    ),
    # The fuzz trained the warm start without ShardedUpdate, and compared it with that.
    "a warm start with sharded updates": Case(blocks=(), inner="inductor", is_sharded=True),
}
