"""What a training loop may do between two lines, as plain data.

Each action is done by all ranks at the same line of the program, and each rank does its part: with
a batch of its own, or nothing, if it is none of the action's `ranks`. `performing.py` does them.
"""

from __future__ import annotations

from dataclasses import dataclass

NUM_RANKS = 3
ALL_RANKS = tuple(range(NUM_RANKS))

# The batch size and the sequence length of each rank.
Sizes = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`times` training steps: forward, backward that reduces gradients, update.

    `branches` is which of two layers each rank uses in the blocks that have two. Ranks of `skips`
    leave out the update, as after an overflow. Ranks of `differentiates_input` call
    `autograd.grad` by the input before `backward()`. With `num_forwards=2` the losses of two
    forwards are added, and differentiated once. With `sums_loss` ranks sum their losses before
    `backward()`, on DDP's group, as a loop does that logs it.
    """

    sizes: Sizes
    times: int = 1
    branches: tuple[int, ...] = (0,) * NUM_RANKS
    skips: tuple[int, ...] = ()
    differentiates_input: tuple[int, ...] = ()
    num_forwards: int = 1
    sums_loss: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """`times` forwards and backwards under `no_sync`, and no update."""

    sizes: Sizes
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """A forward of some ranks that no backward follows."""

    ranks: tuple[int, ...]
    sizes: Sizes
    is_training: bool = False
    has_gradients: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentiateInput:
    """A forward of some ranks, and `autograd.grad` by its input, as for a saliency map."""

    ranks: tuple[int, ...]
    sizes: Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class RaiseInForward:
    """A batch of some ranks has the wrong width; the loop catches the error and goes on."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaiseInBackward:
    """A hook raises on all ranks, and the loop catches the error and goes on.

    The hook is on the "output", so that no gradient has arrived, or on the "middle" parameter.
    """

    sizes: Sizes
    where: str = "output"
    is_under_no_sync: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Steps under `ddp.join()`: as many on each rank as it has batches."""

    sizes: Sizes
    num_batches: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicate:
    """A collective of the user's own, on DDP's group: one of `COLLECTIVES`."""

    kind: str


COLLECTIVES = ("barrier", "broadcast", "all_reduce", "all_gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeLate:
    """Some ranks sleep, so that the others come to the next collective long before them."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """Some ranks call `torch._dynamo.reset()`, and compile anew."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRecompiles:
    """Some ranks may compile a frame no more than `limit` times; then they run it eagerly."""

    ranks: tuple[int, ...]
    limit: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """All ranks freeze every other parameter, or train all again."""

    is_frozen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebucket:
    """All ranks call `ddpopt.rebucket` with a plan of at most so many buckets.

    Eager DDP does nothing: its numbers do not depend on buckets.
    """

    num_buckets: int


Action = (
    Step
    | Accumulate
    | Evaluate
    | DifferentiateInput
    | RaiseInForward
    | RaiseInBackward
    | Join
    | Communicate
    | BeLate
    | Reset
    | LimitRecompiles
    | Freeze
    | Rebucket
)
