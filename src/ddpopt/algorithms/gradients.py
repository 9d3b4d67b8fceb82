"""`ShardedGradients`: the averaged gradients of this rank's pieces, and what `.grad` is meanwhile.

During backward, `.grad` of parameters belongs to autograd and DDP, as usual. Afterwards it is an
`AbsentGradient`, and the pieces' `.grad` is another one, so that `zero_grad` of the model and of
the optimizer find them. Only an update sees the averaged values: no rank has those of whole
parameters, and code that reads `.grad`, such as `torch.nn.utils.clip_grad_norm_`, must not get one
rank's part, or nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddpopt import _torch
from ddpopt.algorithms.comm import Complete, Works
from ddpopt.algorithms.shards import Shards
from ddpopt.errors import AbsentGradientError
from ddpopt.ranks.agreement import communicating

_ZERO = ("zero_", "_foreach_zero_")
_IGNORED = ("detach_", "requires_grad_")  # what zero_grad calls first
# What Dynamo asks of a parameter's gradient when it compiles code with the parameter; "__get__" is
# for properties, such as shape.
_KNOWN = (
    "__get__",
    "_is_view",
    "dim",
    "is_conj",
    "is_neg",
    "size",
    "storage_offset",
    "stride",
    "untyped_storage",
)
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # GradScaler's


class GradientOwner(Protocol):
    """Has the averaged gradients of this rank's pieces."""

    def zero(self, index: int) -> None:
        """Make the gradient of a parameter zero."""

    def unscale(self, indices: Sequence[int], found_inf: torch.Tensor, scale: torch.Tensor) -> None:
        """Multiply the gradients of parameters; tell all ranks if any rank's is not finite."""


class AbsentGradient(torch.Tensor):
    """A parameter's gradient that no rank has as a whole; it has no memory.

    It has the parameter's shape, dtype and device. `zero_grad` and `GradScaler` may use it, and
    Dynamo may inspect it; all else raises AbsentGradientError.
    """

    owner: Callable[[], GradientOwner | None]
    parameter_index: int

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, index: int, owner: Callable[[], GradientOwner | None]
    ) -> AbsentGradient:
        """Return one to replace the gradient of `like`; `owner` is a weak reference."""
        made = _torch.without_memory(cls, like)
        made.parameter_index, made.owner = index, owner
        return made

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer what zero_grad, GradScaler and Dynamo ask; raise for all else."""
        name = getattr(function, "__name__", "")
        if name in _IGNORED:
            return args[0]
        if name in _KNOWN:
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if name in _ZERO or name == _UNSCALE:
            values = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            absent = [value for value in values if isinstance(value, AbsentGradient)]
            others = [value for value in values if not isinstance(value, AbsentGradient)]
            owner = absent[0].owner()
            if owner is not None:
                if others:
                    function(others, *args[1:], **kwargs or {})
                if name == _UNSCALE:
                    owner.unscale([value.parameter_index for value in absent], *args[1:])
                    return None
                for value in absent:
                    owner.zero(value.parameter_index)
                return args[0]
        raise AbsentGradientError(_text(name))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own has no types
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise: such a call did not come through Python."""
        raise AbsentGradientError(_text(str(function)))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def _text(what: str) -> str:
    return (
        f"{what} was called on the gradient of a parameter, of which with ShardedUpdate each rank "
        "has only its part; to clip call handle.clip_grad_norm_(max_norm), to read gradients "
        "handle.full_gradients(), with the handle that attach returned; and step() after no_sync() "
        "needs a backward outside of it"
    )


class ShardedGradients:
    """Sums gradients to shards; see this module's docstring.

    Attributes:
        step: Number of the step, for errors.
    """

    def __init__(self, shards: Shards) -> None:
        self.step = 0
        self._shards = shards
        self._parameters = shards.parameters
        self._exchange = shards.exchange
        me = weakref.ref(self)
        self._absent = [AbsentGradient(p, k, me) for k, p in enumerate(self._parameters)]
        self._absent_pieces: list[AbsentGradient] = []
        self._has_gradient = [False] * len(self._parameters)  # whether the shards have it
        self._reductions: list[Complete] = []
        self._hidden: list[int] = []  # gradients that are removed for a forward
        self._lifted: set[int] | None = None  # gradients that were there when a backward began
        self._given: dict[int, torch.Tensor] = {}  # gradients that pieces hold for an update
        self.renew([False] * len(self._parameters))
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                shard, k = shards.home(index)
                shards.gradient(index).copy_(shard.cut(parameter.grad, k))
                self._has_gradient[index] = True
                parameter.grad = self._absent[index]
                shards.piece(index).grad = self._absent_pieces[index]

    def renew(self, are_there: Sequence[bool]) -> None:
        """Switch to new pieces; `are_there` says which of them have a gradient."""
        me = weakref.ref(self)
        pieces = self._shards.pieces()
        self._absent_pieces = [AbsentGradient(p, k, me) for k, p in enumerate(pieces)]
        for piece, absent, is_there in zip(pieces, self._absent_pieces, are_there, strict=True):
            piece.grad = absent if is_there else None

    def release(self) -> None:
        """Remove all gradients that raise."""
        for parameter, absent in zip(self._parameters, self._absent, strict=True):
            if parameter.grad is absent:
                parameter.grad = None

    # ---- forward and backward ----------------------------------------------------------------

    def hide(self) -> None:
        """Remove the placeholders of gradients, until `show`."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is self._absent[index]:
                parameter.grad = None
                self._hidden.append(index)

    def show(self) -> None:
        """Put the placeholders back."""
        for index in self._hidden:
            self._parameters[index].grad = self._absent[index]
        self._hidden.clear()

    def note(self, index: int) -> None:
        """Note a local gradient that autograd is about to accumulate."""
        if self._lifted is None:
            self._lift()
        self._shards.piece(index).grad = self._absent_pieces[index]

    def _lift(self) -> None:
        """Prepare for a backward, in which autograd and DDP read and write gradients.

        What was zeroed since the last backward is forgotten, wherever that was done.
        """
        self.finish()
        self._lifted = set()
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None or self._shards.piece(index).grad is None:
                self._has_gradient[index] = False
                parameter.grad = None
            elif parameter.grad is self._absent[index]:
                parameter.grad = None
                self._lifted.add(index)

    def end_lift(self) -> None:
        """Restore the placeholders of gradients that this backward did not compute."""
        for index in self._lifted or ():
            if self._parameters[index].grad is None and self._shards.piece(index).grad is not None:
                self._parameters[index].grad = self._absent[index]
        self._lifted = None

    def end_backward(self) -> None:
        """Replace all gradients by placeholders that raise."""
        self.end_lift()
        for index, parameter in enumerate(self._parameters):
            has = parameter.grad is not None  # else it was never used, on any rank
            self._has_gradient[index] = has
            parameter.grad = self._absent[index] if has else None
            self._shards.piece(index).grad = self._absent_pieces[index] if has else None

    # ---- sums --------------------------------------------------------------------------------

    def begin_sum(
        self, bucket: int, values: torch.Tensor, members: Sequence[int | None], sizes: Sequence[int]
    ) -> None:
        """Start averaging a bucket's values; `finish` completes this rank's gradients.

        `members` are its parameters, None for foreign ones; `sizes` are their numbers of values.
        """
        having = [k for k in members if k is not None and self._has_gradient[k]]
        parts = [self._shards.gradient(k) for k in having]
        earlier = [part.clone() for part in parts]  # to which this backward adds
        own = self._shards.by_members.get(tuple(members))
        if own is not None:
            works, finish = self._exchange.mean_scatter(values, own.gradient)
        else:
            works, finish = self._begin_mean(values, members, sizes)
        works = self._exchange.follow("sum", bucket, values.nbytes, works)

        def complete() -> None:
            self._exchange.wait(works)
            finish()
            for part, addend in zip(parts, earlier, strict=True):
                part.add_(addend)

        self._reductions.append(complete)

    def _begin_mean(
        self, values: torch.Tensor, members: Sequence[int | None], sizes: Sequence[int]
    ) -> tuple[Works, Complete]:
        """Start averaging a bucket that is not divided: all ranks get all of it, and cut it."""
        values.div_(self._exchange.num_ranks)
        work = self._exchange.communicator.all_reduce(values)

        def cut() -> None:
            for index, part in zip(members, torch.split(values, list(sizes)), strict=True):
                if index is not None:
                    shard, k = self._shards.home(index)
                    self._shards.gradient(index).copy_(shard.cut_flat(part, k))

        return [work], cut

    def finish(self) -> None:
        """Complete this rank's gradients."""
        reductions, self._reductions = self._reductions, []
        with communicating(f"reducing gradients in step {self.step}"):
            for complete in reductions:
                complete()

    # ---- values ------------------------------------------------------------------------------

    def own(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the index and this rank's gradient (a view) of each parameter that has one."""
        self.finish()
        for index, has in enumerate(self._has_gradient):
            is_kept = self._shards.piece(index).grad is not None
            if has and is_kept and self._parameters[index].grad is self._absent[index]:
                yield index, self._shards.gradient(index)

    def gather(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield index and whole gradient (a copy) of each parameter that has one. Collective."""
        having = {index for index, _ in self.own()}
        for shard in self._shards:
            for index, whole in zip(shard.members, shard.gather_gradients(), strict=True):
                if index in having:
                    yield index, whole

    def clip_norm_(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` for whole gradients. Collective."""
        gradients = [gradient for _, gradient in self.own()]
        is_double = any(parameter.dtype is torch.float64 for parameter in self._parameters)
        kind = torch.float64 if is_double else torch.float32
        total = torch.zeros((), device=self._parameters[0].device, dtype=kind)
        norms = [torch.linalg.vector_norm(g, norm_type).to(kind) for g in gradients if g.numel()]
        if norms:
            total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        communicator = self._exchange.communicator
        with communicating("adding up the norms of gradients"):
            if math.isinf(norm_type):
                communicator.all_reduce(total, dist.ReduceOp.MAX).wait()
            else:
                total = total.pow(norm_type)
                communicator.all_reduce(total).wait()
                total = total.pow(1 / norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"the norm of gradients is {total.item()}, so they were not clipped")
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))
        return total

    def give(self, indices: Iterable[int]) -> None:
        """Give these pieces their gradients for an update."""
        gradients = dict(self.own())
        self._given.clear()
        for index in indices:
            piece = self._shards.piece(index)
            if self._parameters[index].grad is None:  # by zero_grad of the model
                piece.grad = None
            elif piece.grad is not None and index in gradients:
                piece.grad = self._given[index] = gradients[index]

    def lend(self, indices: Iterable[int] | None = None) -> None:
        """Give back to these pieces, or to all, what `withhold` took."""
        for index in self._given if indices is None else self._given.keys() & indices:
            self._shards.piece(index).grad = self._given[index]

    def withhold(self, indices: Iterable[int] | None = None) -> None:
        """Take from these pieces, or from all, what they were given, until `lend`."""
        for index in self._given if indices is None else self._given.keys() & indices:
            self._shards.piece(index).grad = None

    def take_away(self) -> None:
        """Remove what `give` gave."""
        for index in self._given:
            self._shards.piece(index).grad = self._absent_pieces[index]
        self._given.clear()

    def zero(self, index: int) -> None:
        """Zero a gradient, and what this rank has accumulated of it."""
        self.finish()
        self._shards.gradient(index).zero_()
        own = self._parameters[index].grad
        if own is not None and own is not self._absent[index]:
            own.zero_()

    def unscale(self, indices: Sequence[int], found_inf: torch.Tensor, scale: torch.Tensor) -> None:
        """Multiply gradients by `scale`; `found_inf` is 1.0 if any rank's are not finite."""
        gradients = dict(self.own())
        for index in indices:
            gradient = gradients[index]
            if not gradient.isfinite().all():
                found_inf.fill_(1.0)
            gradient.mul_(scale.to(gradient.dtype))
        with communicating("asking all ranks for gradients that are not finite"):
            self._exchange.communicator.all_reduce(found_inf, dist.ReduceOp.MAX).wait()
