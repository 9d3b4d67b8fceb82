"""Draw cases with hypothesis: only such as eager DDP takes, as far as that can be told before.

Simple values come first everywhere, since that is where hypothesis shrinks a failing case to.
"""

from __future__ import annotations

import dataclasses

import hypothesis
from hypothesis import strategies as st

from tests.system.campaigns.campaign import one_example
from tests.system.fuzzing.building import RUNS
from tests.system.fuzzing.loops import ACTIONS, ARRANGEMENTS, OPTIMIZERS
from tests.system.fuzzing.spec import AROUND, DTYPES, EXTRAS, FREEZES, PARTLY_UNUSED, Block, Case
from tests.system.fuzzing.wrapping import OPTIONS, WRAPPINGS

# Without state that a second run in backward would change once more, and without graph breaks.
PURE = (
    *("linear", "norm", "scalar", "attention", "dropout", "inplace", "function", "flat"),
    *("sorted", "flex"),
)
PLAIN = (
    *PURE,
    "again",
    "tied",
    "convolution",
    "image",
    "images",
    "operator",
    "conditional",
    "batchnorm",
    "embedding",
    "empty",
    "buffers",
    "cell",
    "parametrized",
    "pruned",
    "noted",
    "recurrent",
    "complex",
    "scatter",
    "strided",
)
EFFECTS = ("counted", "noisy", "ordered", "told", "checked", "linalg", "linalg")
COLLECTIVES = ("collective", "statistics")
_HOOKS = (("gradient",), ("accumulated",), ("halving",), ("writing",))
BREAKS = (
    "break",
    "broken",
    "hooked",
)  # each makes some graphs more, so there is one a case at most
_IN_CHECKPOINT = (*PURE, "again", "tied", "convolution", "image", "embedding")
_DTYPES = (DTYPES[0], *DTYPES)  # half of all blocks are of float32
OUTPUTS = (
    "same",
    "view",
    "detached",
    "detached view",
    "index",
    "none",
    "input",
    "hidden",
    "number",
    "penalty",
    "parameter",
    "pieces",
    "empty",
    "expanded",
    "mask",
    "constant",
    "complex",
    "input view",
    "parameter view",
    "jagged",
    "pair",
    "beside",
)
SUBCLASSES = ("subclass", "jagged", "pair")
CONTAINERS = ("tuple", "list", "dict", "nested", "dataclass")
REGIONS = (*("plain", "checkpoint", "checkpoint"), *filter(None, RUNS))
FEEDS = ("positional", "positional", "positional", "keyword", "dict", "list", *SUBCLASSES)
CAPS_BYTES = (200, 300, 600, 200, 300, 800, None)


def _sometimes(rarity: int) -> st.SearchStrategy[bool]:
    """True once in `rarity` times."""
    return st.integers(0, rarity - 1).map(lambda number: number == rarity - 1)


@st.composite
def blocks(draw: st.DrawFn, kinds: tuple[str, ...], depth: int) -> Block:
    """Draw a block; `depth` is how many blocks may still run one another."""
    is_around = depth > 0 and draw(_sometimes(4))
    kind = draw(st.sampled_from(AROUND if is_around else kinds))
    within = _IN_CHECKPOINT if kind == "checkpoint" else kinds
    inner = blocks(within, 0 if kind == "checkpoint" else depth - 1) if is_around else st.nothing()
    # There is no compiled LSTM of bfloat16 on the CPU.
    dtypes = _DTYPES[:-1] if kind in ("recurrent", "broken") else _DTYPES
    return Block(
        kind=kind,
        choice=draw(st.integers(0, 5)),
        dtype=draw(st.sampled_from(dtypes)),
        frozen=draw(st.sampled_from(("", "", "", "", "weight", "all"))),
        inner=tuple(draw(st.lists(inner, min_size=1, max_size=3))) if is_around else (),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a case."""
    may_be_unused = draw(_sometimes(3))
    communicates, has_effects = draw(_sometimes(4)), draw(_sometimes(3))
    kinds = PLAIN + (PARTLY_UNUSED[:2] if may_be_unused else ())
    kinds += EFFECTS * 2 * has_effects + COLLECTIVES * 4 * communicates
    drawn = draw(st.lists(blocks(kinds, 2), min_size=1, max_size=5))
    if draw(_sometimes(3)):
        # With other layers in backward, ranks would not communicate in one order.
        may_choose = may_be_unused and not communicates
        kinds = BREAKS + (PARTLY_UNUSED[2:] * 2 if may_choose else ())
        break_ = draw(blocks(kinds, 0))
        if break_.kind == "broken":
            drawn = [dataclasses.replace(break_, inner=tuple(drawn))]
        else:
            drawn.insert(draw(st.integers(0, len(drawn))), break_)
    has_outputs = draw(st.booleans())
    outputs = st.lists(st.sampled_from(OUTPUTS), min_size=1, max_size=4, unique=True)
    case = Case(
        blocks=tuple(drawn),
        seed=draw(st.integers(0, 99)),
        batches=draw(_batches()),
        outputs=tuple(draw(outputs)) if has_outputs else (),
        container=draw(st.sampled_from(CONTAINERS)) if has_outputs else "tensor",
        feed=draw(st.sampled_from(FEEDS)),
        input_dtype=draw(st.sampled_from(_DTYPES)),
        is_input_trained=draw(_sometimes(4)),
        input_writes=draw(st.sampled_from((*[""] * 9, "first", "both"))),
        is_registered_in_reverse=draw(_sometimes(4)),
        hooks=draw(st.sampled_from(((), (), (), *_HOOKS))),
        momentum=draw(st.booleans()),
        clears_to_none=not draw(_sometimes(3)),
        evaluates_between=draw(_sometimes(5)),
        cap_bytes=draw(st.sampled_from(CAPS_BYTES)),
        static_graph=draw(_sometimes(5)),
        find_unused=may_be_unused or draw(_sometimes(6)),
        bucket_view=draw(_sometimes(3)),
        broadcasts_buffers=not draw(_sometimes(4)),
        more_options=tuple(name for name in OPTIONS if draw(_sometimes(6))),
        comm_hook="fp16" if draw(_sometimes(8)) else "",
        wrapping=draw(st.sampled_from(WRAPPINGS)) if draw(_sometimes(6)) else "",
        compiles_inside=draw(_sometimes(4)),
        fullgraph=draw(_sometimes(6)),
        regions=draw(st.sampled_from(REGIONS)) if draw(_sometimes(4)) else "",
        split=draw(st.sampled_from(("auto", "forward"))),
        inner=draw(st.sampled_from(("aot_eager", "aot_eager", "aot_eager", "eager"))),
        freezes=draw(_in_steps(FREEZES)),
        extras=draw(_in_steps(EXTRAS)),
        copied=draw(st.sampled_from((*[""] * 10, "deepcopy", "pickle", "pickle"))),
        more_rows=draw(st.sampled_from(((), (), (0, 20), (0, 1), (9, 0, 20)))),
        delayed=draw(st.sampled_from((*[""] * 10, "last", "most"))),
        ignored=draw(st.sampled_from((*[""] * 10, "last", "most"))),
        has_heads=draw(_sometimes(6)),
        has_second=draw(_sometimes(6)),
        second_has_one_bucket=draw(_sometimes(3)),
        runs_backward_inside=draw(_sometimes(6)),
    )
    if draw(_sometimes(4)):
        case = draw(_loops(case))
    return _possible(case)


@st.composite
def _loops(draw: st.DrawFn, case: Case) -> Case:
    """Draw the optimizers, and what is done around their updates."""
    actions = draw(st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=4, unique=True))
    return dataclasses.replace(
        case,
        batches=case.batches + case.batches[-1:] * (3 - len(case.batches)),
        optimizer=draw(st.sampled_from(("SGD", "SGD", "AdamW", *OPTIMIZERS))),
        arrangement=draw(st.sampled_from(("", *ARRANGEMENTS))),
        actions=tuple(actions),
    )


@st.composite
def _batches(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Draw two steps, or three; the batch size may change in the second, or in each."""
    sizes = [
        draw(st.sampled_from((3, 3, 3, 5, 2))) for _ in range(draw(st.sampled_from((2, 2, 3))))
    ]
    num_parts = draw(st.sampled_from((1, 1, 2)))
    return tuple((size,) * num_parts for size in sizes)


@st.composite
def _in_steps(draw: st.DrawFn, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Draw what happens in each step, in a fifth of all cases."""
    if not draw(_sometimes(5)):
        return ()
    return tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5)))


def _possible(case: Case) -> Case:
    """Change what eager DDP is known to refuse."""
    kinds = {block.kind for block in case.all_blocks()}
    if case.regions:
        case = dataclasses.replace(case, compiles_inside=False, wrapping="")
    if "numbers" in kinds:
        case = dataclasses.replace(case, dynamo_flags=("allow_rnn", "capture_scalar_outputs"))
    case = _possible_wrapping(case, kinds)
    if any(case.freezes):
        case = dataclasses.replace(case, static_graph=False)
    if case.find_unused:  # it would have all reduced at once, in a backward that does not come
        some = tuple("half" if how == "all" else how for how in case.freezes)
        case = dataclasses.replace(case, freezes=some)
    elif "half" in case.freezes:
        some = tuple("all" if how == "half" else how for how in case.freezes)
        case = dataclasses.replace(case, freezes=some)
    case = _possible_blocks(case, kinds)
    if any(case.extras):  # ranks would wait for each other's buffers
        case = dataclasses.replace(case, broadcasts_buffers=False)
    more = max(len(case.freezes), len(case.extras)) - len(case.batches)
    case = dataclasses.replace(case, batches=case.batches + case.batches[-1:] * more)
    if "noted" in kinds:  # hooks of tensors are not copied
        case = dataclasses.replace(case, copied="")
    if case.copied:
        case = dataclasses.replace(case, hooks=(), delayed="", comm_hook="")
    is_bound = case.compiles_inside or case.regions == "function"
    if case.copied == "pickle" and (is_bound or kinds & {"hooked", "parametrized"}):
        case = dataclasses.replace(case, copied="deepcopy")
    case = _possible_ways(case)
    return _possible_in_ddp(_possible_in_loops(case, kinds), kinds)


def _possible_wrapping(case: Case, kinds: set[str]) -> Case:
    """Change what cannot be around a DDP module, or in it."""
    # Dynamo cannot have all of DDP's own forward in one graph.
    is_whole = case.compiles_inside and not kinds & {*BREAKS, "choose", *EFFECTS}
    case = dataclasses.replace(case, fullgraph=case.fullgraph and is_whole)
    if not case.has_second:
        case = dataclasses.replace(case, second_has_one_bucket=False)
    if kinds & {*PARTLY_UNUSED}:
        case = dataclasses.replace(case, wrapping="")
    if not case.wrapping:
        return case
    case = dataclasses.replace(
        case,
        compiles_inside=False,
        runs_backward_inside=False,
        copied="",
        delayed="",
        ignored="",
        has_heads=False,
        fullgraph=False,
        find_unused=False,
        static_graph=False,
    )
    # Forward runs again in a checkpoint, and `replicate` has no `no_sync`.
    is_pure = kinds <= {*_IN_CHECKPOINT, "residual", "parallel", "chunk", "early"}
    if case.wrapping == "checkpoint" and not is_pure:
        return dataclasses.replace(case, wrapping="")
    if case.wrapping == "replicate":
        extras = tuple("" if how == "no_sync" else how for how in case.extras)
        batches = tuple(sizes[:1] for sizes in case.batches)
        return dataclasses.replace(case, extras=extras, batches=batches)
    if case.wrapping == "nested" and not case.blocks:
        return dataclasses.replace(case, wrapping="")
    return case


def _possible_ways(case: Case) -> Case:
    """Change what cannot be with heads, a second model, or a backward that is compiled around."""
    if case.has_heads:  # a step has parts, and a part leaves a head out
        some = tuple("half" if how == "all" else how for how in case.freezes)
        batches = tuple((*sizes, *sizes)[:2] for sizes in case.batches)
        case = dataclasses.replace(
            case, batches=batches, find_unused=True, static_graph=False, freezes=some, delayed=""
        )
    if case.has_second:
        case = dataclasses.replace(case, copied="")
    if case.compiles_inside or case.regions:
        case = dataclasses.replace(case, runs_backward_inside=False)
    if case.runs_backward_inside:  # which is of the model's output, and of nothing else
        extras = tuple("" if how == "no_sync" else how for how in case.extras)
        case = dataclasses.replace(case, arrangement="", extras=extras, is_input_trained=False)
        own_backwards = ("two forwards", "scale", "some first", "twice")
        case = dataclasses.replace(case, actions=_without(case, *own_backwards))
    return case


def _possible_blocks(case: Case, kinds: set[str]) -> Case:
    if kinds & {*COLLECTIVES}:  # the others would wait for rank 0
        case = dataclasses.replace(case, extras=())
    if case.feed == "subclass":  # AOTAutograd takes a tensor of two for what it is not
        rest = tuple(name for name in case.outputs if name not in ("pair", "jagged"))
        case = dataclasses.replace(case, outputs=rest)
    if case.delayed and "accumulated" in case.hooks:  # DDP gives unused ones a gradient of zeros
        case = dataclasses.replace(case, hooks=())
    if "writing" in case.hooks and kinds & {*EFFECTS, "noted"}:  # backward writes and reads too
        case = dataclasses.replace(case, hooks=())
    return case


def _possible_in_loops(case: Case, kinds: set[str]) -> Case:
    if "pruned" in kinds:  # what hooks compute cannot be copied
        case = dataclasses.replace(case, copied="", actions=_without(case, "ema", "copy"))
    if case.copied:  # the encoder is not
        case = dataclasses.replace(case, arrangement="")
    if case.arrangement.endswith("encoder"):
        # A rank's forward alone may rebuild one module's buckets, and then another module's.
        case = dataclasses.replace(case, extras=())
    # Sums of squares are rounded otherwise, and most optimizers make an update of any size of a
    # gradient that is nothing but rounding, as that of a bias before a norm.
    if case.optimizer != "SGD":
        case = dataclasses.replace(case, actions=_without(case, "clip 2"))
    return case


def _without(case: Case, *actions: str) -> tuple[str, ...]:
    return tuple(action for action in case.actions if action not in actions)


def _possible_in_ddp(case: Case, kinds: set[str]) -> Case:
    if case.is_input_trained:  # autograd refuses writes to a leaf
        case = dataclasses.replace(case, input_writes="")
    if "choose" in kinds:
        case = dataclasses.replace(case, static_graph=False)
    if case.regions == "reentrant":  # DDP takes them for parameters that are ready twice
        case = dataclasses.replace(case, regions="checkpoint" if case.find_unused else "reentrant")
    if case.static_graph:  # which takes the first backward for what all are like
        case = dataclasses.replace(case, batches=tuple(sizes[:1] for sizes in case.batches))
    return case


def draw_case(number: int) -> Case:
    """Return the case of a number; see [Note: one run of hypothesis a case]."""
    drawn: list[Case] = []

    @hypothesis.seed(number)
    @one_example()
    @hypothesis.given(cases())
    def draw(case: Case) -> None:
        drawn.append(case)

    draw()
    return drawn[-1]


def with_inner(case: Case, inner: str) -> Case:
    """Return a case with another inner compiler.

    Inductor rounds otherwise than eager, and otherwise where a graph is cut. Most optimizers make
    an update of any size of a gradient that is nothing but rounding (Rprop goes by its sign), and
    then nothing can be compared any more. So Inductor's cases are trained by SGD.
    """
    optimizer = "SGD" if inner == "inductor" else case.optimizer
    return dataclasses.replace(case, inner=inner, optimizer=optimizer)
