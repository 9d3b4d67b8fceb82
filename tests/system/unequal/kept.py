"""Scripts that once failed, by what was wrong."""

from __future__ import annotations

from tests.system.unequal.actions import Communicate, Evaluate, Rebucket, Step
from tests.system.unequal.script import Block, Script

_ALIKE = ((8, 2),) * 3
_OTHERWISE_ON_1 = ((8, 2), (5, 2), (8, 2))
_ALONE = Evaluate(ranks=(0,), sizes=((2, 3),) * 3, has_gradients=True)
_SMALL = ((2, 3),) * 3
_FOUR_LAYERS = (Block(kind="linear"),) * 4

KEPT: dict[str, Script] = {
    # One rank compiled anew, for the buckets that DDP has; the others ran what was cut for those
    # that were predicted, and issued a collective of the model's own on the other side of a bucket.
    "a recompile for actual buckets, beside code for predicted ones": Script(
        blocks=(*(Block(kind="norm"),) * 4, Block(kind="wide")),
        num_before_break=4,
        actions=(Step(sizes=_ALIKE, times=5), Step(sizes=_OTHERWISE_ON_1, times=3)),
        cap_bytes=1100,
    ),
    "a recompile for chosen buckets, beside code that is cut finely": Script(
        blocks=(Block(kind="norm"),) * 9,
        actions=(Step(sizes=_ALIKE, times=17), Step(sizes=_OTHERWISE_ON_1, times=3)),
        buckets="auto",
        cap_bytes=1500,
    ),
    # Which calls a section makes again depended on the sizes of this rank's batch, and took a
    # collective along.
    "a recomputed collective beside a snapshot of another size": Script(
        blocks=(Block(kind="norm", has_positions=True, is_checkpointed=True),) * 4,
        actions=(Step(sizes=((1, 2), (4, 12), (1, 2)), times=3),),
        cap_bytes=300,
    ),
    # A new Reducer rebuilds its buckets in its second forward, which is collective.
    "a rank alone runs the second forward with the buckets of a plan": Script(
        blocks=_FOUR_LAYERS,
        actions=(Step(sizes=_SMALL, times=3), _ALONE, Communicate(kind="barrier")),
        buckets="plan",
    ),
    "a rank alone runs the second forward with the buckets that were chosen": Script(
        blocks=_FOUR_LAYERS,
        actions=(Step(sizes=_SMALL, times=9), _ALONE, Communicate(kind="barrier")),
        buckets="auto",
    ),
    "a rank alone runs the second forward after rebucket": Script(
        blocks=_FOUR_LAYERS,
        actions=(
            Step(sizes=_SMALL, times=2),
            Rebucket(num_buckets=2),
            Step(sizes=_SMALL),
            _ALONE,
            Communicate(kind="barrier"),
        ),
    ),
    # With a static graph it queued DDP's delayed allreduce in a pass that brings no gradient.
    "autograd.grad in the first step after rebucket, with a static graph": Script(
        blocks=_FOUR_LAYERS,
        actions=(
            Step(sizes=_SMALL, times=2),
            Rebucket(num_buckets=2),
            Step(sizes=_SMALL, differentiates_input=(0, 1, 2)),
            Step(sizes=_SMALL, times=2),
        ),
        static_graph=True,
    ),
}
