"""What a case is: a model, DDP's options, ddpopt's options and a training loop, as plain data.

Nothing but strings, numbers, booleans and tuples, so that a case can be sent to other processes,
compared, hashed, and pasted into `kept.py` as it is printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from tests.system.campaigns.source import source_of

DTYPES = ("float32", "float64", "bfloat16")

# What runs around other blocks.
AROUND = ("residual", "parallel", "chunk", "early", "numbers", "checkpoint", "autocast", "no_grad")
# What some parameters of take no part in backward, in some steps or on some ranks.
PARTLY_UNUSED = ("unused", "detached", "choose")
# What is frozen in a step of what was not when DDP was made: every other parameter, or all;
# "thawed" is nothing, and what was frozen then is trained, which DDP does not reduce.
FREEZES = ("", "half", "all", "thawed")
# What rank 0 alone runs before a step: a forward in eval mode, without gradients, under `no_sync`.
EXTRAS = ("", "eval", "no_grad", "no_sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a model that maps (batch, WIDTH) to (batch, WIDTH); see `blocks.py` for kinds.

    `choice` selects a variant of the kind. `frozen` is "", "weight" or "all". `inner` are the
    blocks that a block of `AROUND` runs.
    """

    kind: str
    choice: int = 0
    dtype: str = "float32"
    frozen: str = ""
    inner: tuple[Block, ...] = ()

    def all(self) -> Iterator[Block]:
        """Give this block and all within it."""
        yield self
        for block in self.inner:
            yield from block.all()

    def in_double(self) -> Block:
        """This block with float64 in place of bfloat16."""
        dtype = "float64" if self.dtype == "bfloat16" else self.dtype
        inner = tuple(block.in_double() for block in self.inner)
        return dataclasses.replace(self, dtype=dtype, inner=inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model, and how it is trained.

    `batches` are the sizes of the batches of each step; all but a step's last run under `no_sync`.
    `outputs` are returned beside the main one, in a `container`. The model writes to its input
    "first", or at "both" ends. `hooks` are put on parameters. `cap_bytes` is DDP's `bucket_cap_mb`
    in bytes, None for its default. `more_options`, `comm_hook` and `wrapping` are listed in
    `wrapping.py`. `regions` has two blocks each compiled in place, and nothing else, run as
    `building.py` lists. `dynamo_flags` are those of Dynamo's configuration that are on. `freezes`
    and `extras` have an item a step, or none. `copied` is how the DDP module is copied after the
    first step, to train the copy from then on: "deepcopy", "pickle", or "" for not at all.
    `more_rows` is how many rows rank 1 has more in each step. `delayed` and `ignored` are the
    parameters that DDP delays, or leaves alone: "last" for those of the last layer, "most" for
    those of the blocks too. With `has_heads` each micro-batch of a step trains another last layer,
    with `has_second` each step trains a second model of the same class as well, which may have one
    bucket, and with `runs_backward_inside` what is compiled is a function that runs forward and
    backward. The last fields are what `loops.py` lists of optimizers and of loops.
    """

    blocks: tuple[Block, ...]
    seed: int = 0
    batches: tuple[tuple[int, ...], ...] = ((3,), (3,))
    outputs: tuple[str, ...] = ()
    container: str = "tensor"
    feed: str = "positional"
    input_dtype: str = "float32"
    is_input_trained: bool = False
    input_writes: str = ""
    is_registered_in_reverse: bool = False
    hooks: tuple[str, ...] = ()
    momentum: bool = False
    clears_to_none: bool = True
    evaluates_between: bool = False
    cap_bytes: int | None = 200
    static_graph: bool = False
    find_unused: bool = False
    bucket_view: bool = False
    broadcasts_buffers: bool = True
    more_options: tuple[str, ...] = ()
    comm_hook: str = ""
    wrapping: str = ""
    compiles_inside: bool = False
    fullgraph: bool = False
    regions: str = ""
    dynamo_flags: tuple[str, ...] = ("allow_rnn",)
    split: str = "backward"
    inner: str = "aot_eager"
    freezes: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    copied: str = ""
    more_rows: tuple[int, ...] = ()
    delayed: str = ""
    ignored: str = ""
    has_heads: bool = False
    has_second: bool = False
    second_has_one_bucket: bool = False
    runs_backward_inside: bool = False
    optimizer: str = "SGD"
    arrangement: str = ""
    actions: tuple[str, ...] = ()

    def all_blocks(self) -> Iterator[Block]:
        """Give all blocks, those within others too."""
        for block in self.blocks:
            yield from block.all()

    def in_double(self) -> Case:
        """This case with float64 in place of bfloat16, except for what autocast computes."""
        dtype = "float64" if self.input_dtype == "bfloat16" else self.input_dtype
        blocks = tuple(block.in_double() for block in self.blocks)
        return dataclasses.replace(self, input_dtype=dtype, blocks=blocks)

    @property
    def dtypes(self) -> set[str]:
        """The dtypes in which the case computes."""
        dtypes = {block.dtype for block in self.all_blocks()} | {self.input_dtype, "float32"}
        if "autocast" in {*self.actions, *(block.kind for block in self.all_blocks())}:
            dtypes.add("bfloat16")
        return dtypes

    @property
    def num_steps(self) -> int:
        return len(self.batches)

    def features(self) -> set[str]:
        """Return what can be counted of a case."""
        found = {f"block {block.kind}" for block in self.all_blocks()}
        found |= {f"dtype {dtype}" for dtype in self.dtypes}
        found |= {f"output {name}" for name in self.outputs} | {f"hook {h}" for h in self.hooks}
        found |= {f"frozen {block.frozen}" for block in self.all_blocks() if block.frozen}
        found |= {f"step frozen {how}" for how in self.freezes if how}
        found |= {f"extra forward {how}" for how in self.extras if how}
        found |= {f"loop {action}" for action in self.actions}
        found |= {f"option {name}" for name in self.more_options}
        named = ("copied", "delayed", "ignored", "arrangement")
        for name in (*named, "wrapping", "comm_hook", "input_writes"):
            found |= {f"{name} {getattr(self, name)}"} if getattr(self, name) else set()
        found |= {"another batch size on another rank"} if any(self.more_rows) else set()
        for name in ("container", "feed", "regions", "split", "inner", "optimizer"):
            found.add(f"{name} {getattr(self, name)}")
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is True:
                found.add(field.name)
        if len({sizes[-1] for sizes in self.batches}) > 1:
            found.add("another batch size in a later step")
        if max(map(len, self.batches)) > 1:
            found.add("no_sync")
        return found

    def __str__(self) -> str:
        return source_of(self)
