"""Cases that once failed, by what was wrong."""

from __future__ import annotations

from tests.system.fuzzing.spec import Block, Case

COMPLEX = "complex numbers in sections that Inductor compiles"
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
    # Forward's effect tokens shifted the places of outputs.
    "an effect beside several outputs": Case(
        blocks=(Block(kind="linear"), Block(kind="told")),
        outputs=("detached", "view", "hidden"),
        container="dict",
    ),
    # A section's first run, on fake tensors, returned its effect token as its first result.
    "an effect in a section of forward": Case(
        blocks=(Block(kind="checked", choice=2),), split="forward"
    ),
    "effects in backward, which is cut in forward instead": Case(
        blocks=(Block(kind="linear"), Block(kind="ordered", choice=2))
    ),
    # Where the fewest bytes are kept depends on the rows, so ranks cut on other sides of it.
    "a cut beside a collective, with more rows on one rank": Case(
        blocks=(Block(kind="statistics", choice=1), Block(kind="linear")), more_rows=(20, 20)
    ),
    # Whether a subclass kept a graph whole depended on whether the batch size was a symbol.
    "a subclass's output and a collective, with more rows on one rank": Case(
        blocks=(Block(kind="statistics", choice=1), Block(kind="image")),
        outputs=("pair",),
        more_rows=(9, 0, 20),
    ),
    # One autograd node gave out all gradients, those that the delayed reduction waits for too late.
    "delayed parameters in a graph that is whole": Case(blocks=(), delayed="most"),
    # A section was first run on fake tensors, which one with a symbolic size did not survive.
    "a subclass's output after the batch size changed": Case(
        blocks=(Block(kind="linear"),),
        batches=((3,), (2,)),
        outputs=("pair",),
        container="list",
        split="forward",
    ),
    # It makes views of outputs, whose places effect tokens and parts of subclasses shift.
    "a view in a section with an effect": Case(
        blocks=(Block(kind="linear"), Block(kind="told")),
        outputs=("view",),
        container="list",
        cap_bytes=500,
        split="forward",
    ),
    "a view of the input in a section that returns a subclass": Case(
        blocks=(), outputs=("pair", "input view"), container="list", split="forward"
    ),
    # torch can compile a graph that makes a nested tensor once only, and its cut had been refused.
    "a nested tensor in a graph whose backward has effects": Case(
        blocks=(Block(kind="linear"), Block(kind="ordered", choice=1)),
        outputs=("jagged",),
        container="list",
    ),
    # Inductor compiles no section with a symbolic size where an input is a nested tensor; beside a
    # collective of the model's own that ended training.
    "a nested input and a collective": Case(
        blocks=(Block(kind="hooked", choice=1), Block(kind="statistics", choice=4)),
        feed="jagged",
        inner="inductor",
    ),
    # Inductor wrote in place to a part of a complex tensor, behind a reader of the whole.
    COMPLEX: Case(
        blocks=(Block(kind="complex", choice=1), Block(kind="complex", choice=1)), inner="inductor"
    ),
    # Its gradients' sums in bfloat16 cancel but for a few bits, and three addends in another order
    # gave others than eager, as far from float64's.
    "a batch norm in bfloat16 beside a layer in another section": Case(
        blocks=(
            Block(kind="hooked", choice=3, dtype="float64"),
            Block(
                kind="parallel",
                dtype="bfloat16",
                inner=(Block(kind="batchnorm", frozen="weight"), Block(kind="tied", choice=3)),
            ),
            Block(kind="no_grad", dtype="bfloat16", inner=(Block(kind="flat", choice=5),)),
        ),
        seed=25,
        batches=((3,), (5,), (5,)),
        outputs=("hidden",),
        container="list",
        input_dtype="float64",
        input_writes="first",
        clears_to_none=False,
        cap_bytes=600,
        bucket_view=True,
        broadcasts_buffers=False,
        regions="checkpoint",
        split="forward",
        freezes=("all", "thawed", "all"),
        extras=("no_grad", "eval", "no_sync"),
        more_rows=(9, 0, 20),
        has_second=True,
        optimizer="Adam",
        arrangement="two optimizers",
        actions=("grow", "restore"),
    ),
}
