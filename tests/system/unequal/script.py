"""What a script is: a model, DDP's options, ddpopt's options and a loop, as plain data.

Nothing but strings, numbers, booleans, tuples and dataclasses of these, so that a script can be
sent to other processes, compared, hashed, and pasted into `kept.py` as it is printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from tests.system.campaigns.source import source_of, value_of
from tests.system.unequal import actions as actions_module
from tests.system.unequal.actions import Action, Step

# Kinds of blocks whose forward and backward have collectives of their own.
COMMUNICATING = ("norm", "gather", "exchange")
# Kinds of blocks of which some parameters may take no part in a step.
PARTLY_UNUSED = ("unused", "branch")
KINDS = ("linear", "conv", "shared", "wide", "batchnorm", *PARTLY_UNUSED, *COMMUNICATING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a model that maps (batch, length, WIDTH) to the same; see `models.py` for kinds.

    `has_positions` adds a table of positions, which is a buffer, and a layer behind it.
    """

    kind: str
    has_positions: bool = False
    is_checkpointed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One model, and what its training loop does.

    `num_before_break` is how many blocks come before a graph break, 0 for none. `cap_bytes` is
    DDP's `bucket_cap_mb` in bytes. `second` is a second DDP module: "after" the first, on its
    output, or "beside" it, with a backward of its own; "" for none. `buckets` is "ddp", "auto", or
    "plan" for a plan's file; the plan of "auto" or of a file has at most `num_planned` buckets, and
    with `takes_back` what "auto" chose is found to be worse and undone.
    """

    blocks: tuple[Block, ...]
    actions: tuple[Action, ...]
    num_before_break: int = 0
    second: str = ""
    cap_bytes: int = 700
    static_graph: bool = False
    find_unused: bool = False
    bucket_view: bool = False
    broadcasts_buffers: bool = False
    compiles_inside: bool = False
    is_dynamic: bool = False
    is_registered_in_reverse: bool = False
    split: str = "auto"
    buckets: str = "ddp"
    num_planned: int = 3
    takes_back: bool = False
    optimizer: str = "SGD"
    clears_to_none: bool = True

    @property
    def communicates(self) -> bool:
        """Whether the model has collectives of its own."""
        return any(block.kind in COMMUNICATING for block in self.blocks)

    @property
    def communicates_in_checkpoints(self) -> bool:
        """Whether a checkpoint has collectives, which eager issues again in backward."""
        return any(block.kind in COMMUNICATING and block.is_checkpointed for block in self.blocks)

    @property
    def broadcasts_any(self) -> bool:
        """Whether each forward is collective, since it broadcasts buffers."""
        has_buffers = any(b.has_positions or b.kind == "batchnorm" for b in self.blocks)
        return self.broadcasts_buffers and has_buffers

    @property
    def num_steps(self) -> int:
        """How many training steps the loop has, those under `join` not counted."""
        return sum(action.times for action in self.actions if isinstance(action, Step))

    def features(self) -> Iterator[str]:
        """What can be counted of a script."""
        for action in self.actions:
            yield f"action {type(action).__name__}"
        for kind in {block.kind for block in self.blocks}:
            yield f"block {kind}"
        if any(block.is_checkpointed for block in self.blocks):
            yield "block that is checkpointed"
        if any(block.has_positions for block in self.blocks):
            yield "block with positions"
        if self.num_before_break:
            yield "graph break"
        for name in ("second", "split", "buckets", "optimizer"):
            if getattr(self, name):
                yield f"{name} {getattr(self, name)}"
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) and value != field.default:
                yield f"{field.name} {value}"

    def __str__(self) -> str:
        return source_of(self)


def script_of(source: str) -> Script:
    """The script that `str` made a line of."""
    script: Script = value_of(source, Script, {**vars(actions_module), **_CLASSES})
    return script


_CLASSES = {"Block": Block, "Script": Script}
