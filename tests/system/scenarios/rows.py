"""All rows by name, so that worker processes can be told which one to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ddpopt.errors import Reason
from tests.support.device import DEVICE
from tests.system.fuzzing.spec import Block, Case
from tests.system.fuzzing.wrapping import OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case, and what is expected of it but equality.

    `fallbacks` are the reasons for which graphs of this row are compiled whole. `eager_error` names
    the exception with which eager DDP refuses the row. Where the unsplit Inductor compile is not as
    eager DDP either, a row need not be (`is_exact_on_inductor`). `note` goes into
    docs/compatibility.md.
    """

    case: Case
    fallbacks: frozenset[Reason] = frozenset()
    eager_error: str | None = None
    is_exact_on_inductor: bool = True
    note: str = ""


RELU, GELU, SILU, LINEAR = (Block(kind="linear", choice=choice) for choice in (6, 2, 4, 8))
MLP = (RELU,) * 4  # of six layers, with the model's own
NORM, CAUSAL = Block(kind="norm"), Block(kind="attention", choice=1)
UNUSED = Block(kind="unused")
_CLIP = "clip 2"
_ONE = ((4,),)


def around(kind: str, *inner: Block, choice: int = 0) -> Block:
    """A block that runs others."""
    return Block(kind=kind, choice=choice, inner=inner)


def transformer_layer(attention: Block = CAUSAL, *more: Block) -> tuple[Block, Block]:
    """A pre-norm layer of a transformer, with `more` at the end of its feed-forward part."""
    return around("residual", NORM, attention), around("residual", NORM, GELU, LINEAR, *more)


def checkpointed(choice: int) -> tuple[Block, ...]:
    """A transformer, each layer in a checkpoint of a kind."""
    return (around("checkpoint", *transformer_layer(), choice=choice),) * 3


def case_of(*blocks: Block, actions: tuple[str, ...] = (_CLIP,), **fields: Any) -> Case:
    """Four steps of SGD with momentum, with buckets of two layers."""
    common = {"batches": _ONE * 4, "cap_bytes": 600, "momentum": True}
    return Case(blocks=blocks or MLP, actions=actions, **{**common, **fields})


def _row(*blocks: Block, **fields: Any) -> Row:
    return Row(case=case_of(*blocks, **fields))


def _loop(*actions: str, blocks: tuple[Block, ...] = MLP, **fields: Any) -> Row:
    """A row about what is done around forward and backward."""
    return Row(case=case_of(*blocks, actions=(_CLIP, *actions), **fields))


def _sizes(*rows: int) -> dict[str, Any]:
    return {"batches": tuple((n,) for n in rows)}


TRANSFORMER = transformer_layer() * 3
_GROWING = _sizes(4, 6, 1, 10)
_IMAGES, _WITH_LAST = (Block(kind="images"),) * 3, (Block(kind="images", choice=1),) * 3
_NUMBERS = around("numbers", *MLP)
# Dynamo does not resume a frame behind an LSTM: what is called there are graphs by themselves, so
# it is a block of several layers.
_LSTM = around("broken", *(around("residual", *MLP),) * 2, choice=2)
_FUNCTION, _OPERATORS = (
    (RELU, Block(kind=kind, choice=1)) * 2 for kind in ("function", "operator")
)
_INPUT_VIEWS: dict[str, Any] = {"outputs": ("input view", "input"), "container": "tuple"}

MODELS: dict[str, Row] = {
    "mlp": _row(),
    "transformer": _row(*TRANSFORMER, cap_bytes=1000),
    "MultiheadAttention": _row(*(Block(kind="attention", choice=2),) * 3, cap_bytes=1000),
    "flex_attention": Row(
        case=case_of(*transformer_layer(Block(kind="flex")) * 3, cap_bytes=1000),
        note="projections frozen: no backward on the CPU",
    ),
    "LSTM": Row(case=case_of(_LSTM, dynamo_flags=()), note="Dynamo breaks the graph at it"),
    "LSTM in the graph": _row(_LSTM),
    "conv and batch norm": _row(*_IMAGES, cap_bytes=300),
    "channels_last": _row(*_WITH_LAST, cap_bytes=300),
    "buffers not broadcast": _row(*_IMAGES, cap_bytes=300, broadcasts_buffers=False),
    "mutated buffer": _row(*(Block(kind="buffers", choice=c) for c in range(4))),
    "dropout": _row(*transformer_layer(CAUSAL, Block(kind="dropout")) * 3, cap_bytes=1000),
    "tied weights": _row(*MLP, Block(kind="tied"), Block(kind="tied", choice=1)),
    "frozen parameters": _row(
        RELU, Block(kind="linear", frozen="all"), RELU, Block(kind="linear", frozen="weight"), RELU
    ),
    "two dtypes": _row(*(RELU, Block(kind="linear", dtype="float64")) * 2),
    "bfloat16 parameters": _row(
        *(Block(kind="linear", choice=6, dtype="bfloat16"),) * 4, input_dtype="bfloat16"
    ),
    "complex parameters": _row(*(Block(kind="complex", choice=c) for c in (1, 3, 5))),
    # There is no norm of a sparse gradient.
    "sparse embedding": _row(Block(kind="embedding", choice=1), *MLP, actions=()),
    "dynamic batch": _row(*TRANSFORMER, cap_bytes=1000, **_GROWING),
    "last short batch": _row(**_sizes(4, 4, 4, 3, 4)),
    "graph break": _row(around("broken", *MLP), cap_bytes=300),
    "weight shared across a graph break": _row(
        around("broken", *MLP, Block(kind="again")), cap_bytes=300
    ),
    "activation checkpointing": _row(*checkpointed(0), cap_bytes=1000),
    "selective activation checkpointing": _row(*checkpointed(3), cap_bytes=1000),
    "autocast and no_grad regions": _row(
        around("autocast", RELU, RELU), around("no_grad", RELU), RELU, RELU
    ),
    "torch.cond": _row(RELU, Block(kind="conditional"), RELU),
    "custom autograd Function": _row(*_FUNCTION),
    "custom operators": Row(
        case=case_of(*_OPERATORS),
        note="they may communicate: the forward is cut behind each",
    ),
    "unused branch": _row(RELU, UNUSED, RELU, RELU, find_unused=True),
    "alternating branch": _row(
        RELU, Block(kind="choose", choice=1), RELU, find_unused=True, **_sizes(3, 6, 5, 8, 7, 2)
    ),
    "tuples, sizes and views": _row(around("early", *MLP)),
    "sizes found to be constant": _row(around("early", *MLP, choice=1), **_GROWING),
    "zero-dimensional tensors": _row(around("early", *MLP, choice=2)),
    # Compiled alone: in front of where a number is read, a graph can be cut.
    "numbers read from tensors": Row(
        case=case_of(_NUMBERS, regions="plain", dynamo_flags=("capture_scalar_outputs",)),
        fallbacks=frozenset({Reason.NO_LEGAL_CUT}),
        note="a number read early and used late spans all buckets",
    ),
    "in-place operators": _row(*(Block(kind="inplace", choice=c) for c in range(5)), *MLP),
    "mutated inputs": _row(input_writes="first"),
    "inputs mutated at both ends": _row(input_writes="both"),
    "views of inputs as outputs": _row(actions=(_CLIP, "write"), **_INPUT_VIEWS),
    "inputs that require grad": _row(is_input_trained=True),
    "nested outputs": _row(outputs=("hidden", "none", "number"), container="nested"),
    "dataclass outputs": _row(outputs=("hidden", "pieces", "number"), container="dataclass"),
}

MODES: dict[str, Row] = {
    "static_graph": _row(static_graph=True),
    "static_graph, unused branch": _row(RELU, UNUSED, RELU, RELU, static_graph=True),
    "static_graph, activation checkpointing": _row(
        *checkpointed(0), cap_bytes=1000, static_graph=True
    ),
    "find_unused_parameters": _row(find_unused=True),
    "gradient_as_bucket_view": _row(bucket_view=True),
    **{name: _row(more_options=(name,)) for name in OPTIONS},
    "unused branch, not declared": Row(case=case_of(RELU, UNUSED), eager_error="RuntimeError"),
    "fp16_compress_hook": _row(comm_hook="fp16"),
    "bf16_compress_hook": Row(
        case=case_of(comm_hook="bf16"),
        eager_error=None if dist.is_nccl_available() else "TypeError",
        note="needs NCCL",
    ),
    "powerSGD_hook": Row(
        case=case_of(comm_hook="powerSGD", batches=_ONE * 6),
        note="what it approximates depends on the buckets",
    ),
    "tensor hooks on parameters": _row(hooks=("gradient",)),
    "post-accumulate hooks on parameters": _row(hooks=("halving", "accumulated")),
    "DDP(torch.compile(m, fullgraph=True))": _row(compiles_inside=True, fullgraph=True),
    "DDP within a compiled function": _row(wrapping="function"),
    "composable replicate": _row(wrapping="replicate"),
    "two DDP models": _row(around("early", *MLP), arrangement="compiled encoder"),
    "nested DDP": _row(
        *(around("residual", RELU, RELU, RELU),) * 3, cap_bytes=300, wrapping="nested"
    ),
}

LOOPS: dict[str, Row] = {
    "no_sync": _row(batches=((4,) * 3,) * 3),
    "no_sync, gradient_as_bucket_view": _row(batches=((4,) * 3,) * 3, bucket_view=True),
    "join with uneven inputs": _loop("join", batches=_ONE * 5),
    "ZeroRedundancyOptimizer": _row(optimizer="ZeRO"),
    "GradScaler": _loop("scale", batches=_ONE * 5),
    "autocast": Row(
        case=case_of(*TRANSFORMER, actions=(_CLIP, "autocast"), cap_bytes=1000),
        is_exact_on_inductor=False,
        note="Inductor rounds less often than eager, unsplit too",
    ),
    "two forwards before one backward": _loop("two forwards"),
    # Of a size of its own: compiled for one backward, a cached graph refuses a second.
    "backward twice (retain_graph)": Row(
        case=case_of(actions=(_CLIP, "twice"), **_sizes(6, 6, 6, 6)),
        note="DDP does not reduce the second backward",
    ),
    "torch.autograd.grad on a subset": _loop("some first"),
    "anomaly mode": _loop("anomaly"),
    "eval between steps": Row(
        case=case_of(*_IMAGES, cap_bytes=300, evaluates_between=True),
        fallbacks=frozenset({Reason.NO_GRAD}),
    ),
    "state_dict round trip": _loop("load"),
    "torch._dynamo.reset": _loop("reset", batches=_ONE * 5),
}


def _regions(how: str = "checkpoint", *fallbacks: Reason, **fields: Any) -> Row:
    """Layers of which each is compiled in place, and run by something eager.

    They share their code, of which there are two compiled versions: the first layer's activations
    come in another order than the others'. Both versions save equally many tensors, all of one
    shape (that of the weights, as batches have `WIDTH` rows), so a checkpoint that mixed them up
    would not notice.
    """
    defaults: dict[str, Any] = {"cap_bytes": 200, **_sizes(8, 8, 8, 8)}
    blocks = fields.pop("blocks", (GELU, SILU, *(SILU, GELU) * 2))
    case = case_of(*blocks, regions=how, **{**defaults, **fields})
    return Row(case=case, fallbacks=frozenset(fallbacks))


_ALL_IN_ONE = (around("residual", GELU, SILU), around("residual", GELU, SILU, GELU, SILU))
_CHECKPOINT = "checkpoint around compiled layers"

REGIONS: dict[str, Row] = {
    "compiled layers": _regions("plain"),
    _CHECKPOINT: _regions(),
    f"{_CHECKPOINT}, reentrant": _regions("reentrant", Reason.NO_GRAD, static_graph=True),
    f"{_CHECKPOINT}, no determinism check": _regions("unchecked"),
    f"{_CHECKPOINT}, static_graph": _regions(static_graph=True),
    f"{_CHECKPOINT}, find_unused_parameters": _regions(find_unused=True),
    f"{_CHECKPOINT}, from the third step on": _regions("later"),
    "checkpoint around checkpoints of compiled layers": _regions("nested"),
    "checkpoint around one compiled function": _regions("function"),
    "checkpoint around a compiled model": _regions(blocks=_ALL_IN_ONE),
    "checkpoint around compiled DDP": _row(wrapping="checkpoint"),
    "checkpoint, two DDP modules with other caps": _regions(
        "checkpoint", Reason.ONE_BUCKET, has_second=True, second_has_one_bucket=True
    ),
    "checkpoint, a forward beside DDP's": _regions(arrangement="beside"),
}

TABLES = (MODELS, MODES, LOOPS, REGIONS)
ROWS = {name: row for table in TABLES for name, row in table.items()}

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
        return tuple(ROWS)
    if DEVICE.type != "cpu":
        return ON_INDUCTOR
    if split == "forward":
        return _IN_FORWARD
    return tuple(name for name in ON_INDUCTOR if name not in _SLOW)
