"""`ShardedGradients`: the averaged gradients of this rank's pieces, and what `.grad` is meanwhile.

During backward, `.grad` of parameters belongs to autograd and DDP, as usual. Afterwards it is an
`AbsentGradient`, and the pieces' `.grad` is another one, so that `zero_grad` of the model and of
the optimizer find them. Only an update sees the averaged values: no rank has those of whole
parameters, and code that reads `.grad`, such as `torch.nn.utils.clip_grad_norm_`, must not get one
rank's part, or nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpopt import _torch
from ddpopt.algorithms.comm import Complete, Works
from ddpopt.algorithms.shards import Shards
from ddpopt.errors import AbsentGradientError
from ddpopt.ranks.agree import communicating

_ZERO = ("zero_", "_foreach_zero_")
_IGNORED = ("detach_", "requires_grad_")  # what zero_grad calls first
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # of `grad.data.zero_()`
# What Dynamo asks of a parameter's gradient when it compiles code with the parameter; "__get__" is
# for properties, such as shape.
_KNOWN = (
    *("__get__", "_is_view", "dim", "is_conj", "is_neg", "size", "storage_offset", "stride"),
    *("untyped_storage",),
)
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # GradScaler's


class AbsentGradient(torch.Tensor):
    """A parameter's gradient that no rank has as a whole; it has no memory.

    It has the parameter's shape, dtype and device. `zero_grad` and `GradScaler` may use it, and
    Dynamo may inspect it; all else raises AbsentGradientError.
    """

    owner: Callable[[], ShardedGradients | None]
    parameter_index: int

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, index: int, owner: Callable[[], ShardedGradients | None]
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
        name = getattr(function, "__name__", "")
        if name in _IGNORED or function == _DATA:
            return args[0]
        if name in _KNOWN:
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if name not in _ZERO and name != _UNSCALE:
            raise AbsentGradientError(_text(name))
        values = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        others = [value for value in values if not isinstance(value, AbsentGradient)]
        owned: dict[ShardedGradients, list[int]] = {}  # an optimizer may have several handles
        for value in values:
            if isinstance(value, AbsentGradient):
                owner = value.owner()
                if owner is None:
                    raise AbsentGradientError(_text(name))
                owned.setdefault(owner, []).append(value.parameter_index)
        if others:
            function(others, *args[1:], **kwargs or {})
        for owner, indices in owned.items():
            change = owner.unscale if name == _UNSCALE else owner.zero
            change(indices, *args[1:])
        return None if name == _UNSCALE else args[0]

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
        "handle.full_gradients(), with the handle that attach returned; step() after no_sync() "
        "needs a backward outside of it, and an optimizer made after attach has to be attached: "
        "detach, and attach all of them again"
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
        self._reductions: list[Complete] = []
        # By index:
        self._having: set[int] = set()  # parameters whose gradients the shards have
        self._hidden: list[int] = []  # those whose placeholders are removed for a forward
        self._lifted: list[int] | None = None  # and for a backward, if one is running
        self._local: dict[int, torch.Tensor] = {}  # this rank's own, to be added to those in shards
        self._lent: list[int] = []  # those that the running update has
        self._average_existing()

    def _average_existing(self) -> None:
        """Average the gradients that are there: a backward under no_sync may have made them."""
        has = [float(parameter.grad is not None) for parameter in self._parameters]
        num_having = self._parameters[0].new_tensor(has, dtype=torch.float32)
        with communicating("asking which gradients ranks have"):
            self._exchange.communicator.all_reduce(num_having).wait()
        having = {index for index, number in enumerate(num_having.tolist()) if number}
        for shard in self._shards:
            if not having.isdisjoint(shard.indices):
                self.begin_sum(shard.index, shard.join_gradients(), shard.indices)
        self.finish()
        self._having = having
        self._place(having)

    # ---- placeholders, in forward and backward -----------------------------------------------

    def _placed(self) -> list[int]:
        """Return the parameters that have a placeholder, which zero_grad may have removed."""
        pairs = enumerate(zip(self._parameters, self._absent, strict=True))
        return [index for index, (parameter, absent) in pairs if parameter.grad is absent]

    def _place(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._parameters[index].grad = self._absent[index]

    def hide(self) -> None:
        """Remove the placeholders of gradients, until `show`."""
        self._hidden += self._placed()
        for index in self._hidden:
            self._parameters[index].grad = None

    def show(self) -> None:
        self._place(self._hidden)
        self._hidden.clear()

    def lift(self, will_reduce: bool) -> None:
        """Prepare for a backward, in which autograd and DDP read and write gradients.

        What was zeroed or assigned since the last backward is forgotten. `end_backward` ends one in
        which DDP reduces, `end_lift` another.
        """
        if self._lifted is not None:
            return
        self.finish()
        self._lifted = self._placed()
        self._having.intersection_update(self._lifted)
        for index in self._lifted:
            self._parameters[index].grad = self._local.get(index)
        self._local.clear()
        if not will_reduce:
            _torch.at_end_of_backward(self.end_lift)

    def end_lift(self, has_raised: bool = False) -> None:
        """Put the placeholders back, and keep what this rank has to add to what they stand for.

        Unless all gradients were zeroed since a backward that has raised.
        """
        lifted, self._lifted = self._lifted or [], None
        if lifted and has_raised and not self._has_local():
            self._having.difference_update(lifted)
            return
        for index in lifted:
            local = self._parameters[index].grad
            if local is not None:
                self._local[index] = local
        self._place(lifted)

    def _has_local(self) -> bool:
        """Whether a gradient is there that is not zero."""
        pairs = zip(self._parameters, self._absent, strict=True)
        local = [p.grad for p, absent in pairs if p.grad is not None and p.grad is not absent]
        return any(bool(gradient.any()) for gradient in local)

    def end_backward(self) -> None:
        """Replace all gradients by placeholders that raise."""
        # DDP reduces under no_sync, too, if the forward before it had no backward.
        self._local.clear()
        lifted, self._lifted = self._lifted or [], None
        pairs = enumerate(self._parameters)
        self._having = {index for index, parameter in pairs if parameter.grad is not None}
        self._having.update(lifted)  # a rank may have none for now, but no rank for one never used
        self._place(self._having)

    # ---- sums --------------------------------------------------------------------------------

    def begin_sum(self, bucket: int, values: torch.Tensor, members: Sequence[int]) -> None:
        """Start averaging the values of a bucket, whose parameters are `members`.

        `finish` completes this rank's gradients.
        """
        parts = [self._shards.members[k].gradient for k in members if k in self._having]
        earlier = [part.clone() for part in parts]  # to which this backward adds
        own = self._shards.by_indices.get(tuple(members))
        if own is not None:
            works, finish = self._exchange.mean_scatter(values, own.gradient)
        else:
            works, finish = self._begin_mean(values, members)
        works = self._exchange.follow("sum", bucket, values.nbytes, works)

        def complete() -> None:
            self._exchange.wait(works)
            finish()
            for part, addend in zip(parts, earlier, strict=True):
                part.add_(addend)

        self._reductions.append(complete)

    def _begin_mean(self, values: torch.Tensor, members: Sequence[int]) -> tuple[Works, Complete]:
        """Start averaging a bucket that is not divided: all ranks get all of it, and cut it."""
        values.div_(self._exchange.num_ranks)
        works = [self._exchange.communicator.all_reduce(values)]
        sizes = [self._parameters[k].numel() for k in members]

        def cut() -> None:
            for index, part in zip(members, torch.split(values, sizes), strict=True):
                member = self._shards.members[index]
                member.gradient.copy_(member.cut_flat(part))

        return works, cut

    def finish(self) -> None:
        reductions, self._reductions = self._reductions, []
        with communicating(f"reducing gradients in step {self.step}"):
            for complete in reductions:
                complete()

    # ---- values ------------------------------------------------------------------------------

    def own(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the index and this rank's gradient (a view) of each parameter that has one."""
        self.finish()
        for index in self._placed():
            if index in self._having:
                yield index, self._shards.members[index].gradient

    def find_local(self, indices: Collection[int]) -> int | None:
        """Return one of these whose gradient is this rank's alone: its backward was no_sync's."""

        def is_local(index: int) -> bool:
            gradient = self._parameters[index].grad
            is_whole = gradient is None or gradient is self._absent[index]
            return not is_whole or index in self._local

        return min(filter(is_local, indices), default=None)

    def assign(self, index: int, whole: torch.Tensor) -> None:
        """Replace a gradient by this value, which is the same on all ranks."""
        self.end_lift(has_raised=True)
        self.finish()
        self._local.pop(index, None)
        member = self._shards.members[index]
        member.gradient.copy_(member.cut(whole))
        self._having.add(index)
        self._place([index])

    def gather(self, with_local: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield index and whole gradient (a copy) of each parameter that has one. Collective.

        With what this rank has to add to it, if asked for, as plain DDP has it.
        """
        having = {index for index, _ in self.own()}
        for shard in self._shards:
            for index, whole in zip(shard.indices, shard.gather_gradients(), strict=True):
                if index in having:
                    local = self._local.get(index) if with_local else None
                    yield index, whole if local is None else whole + local

    def clip_norm_(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` for whole gradients. Collective."""
        gradients = [gradient for _, gradient in self.own()]
        is_double = any(parameter.dtype is torch.float64 for parameter in self._parameters)
        kind = torch.float64 if is_double else torch.float32
        norm = self._parameters[0].new_zeros(1, dtype=kind)
        own = [torch.linalg.vector_norm(g, norm_type).to(kind) for g in gradients if g.numel()]
        if own:
            norm[0] = torch.linalg.vector_norm(torch.stack(own), norm_type)
        with communicating("adding up the norms of gradients"):
            norms, work = self._exchange.communicator.collect(norm)
            work.wait()  # each rank's, since a maximum among ranks would lose a NaN
        total: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"the norm of gradients is {total.item()}, so they were not clipped")
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))
        return total

    def lend(self) -> None:
        """Give all pieces their gradients for an update, until `take_back`."""
        for index, gradient in self.own():
            self._shards.members[index].piece.grad = gradient
            self._lent.append(index)

    def take_back(self) -> None:
        """Remove what `lend` gave; where the update has done so, by zero_grad, zero the whole."""
        for index in self._lent:
            piece = self._shards.members[index].piece
            if piece.grad is None:
                self._parameters[index].grad = None
            piece.grad = None
        self._lent.clear()

    def zero(self, indices: Sequence[int]) -> None:
        self.finish()
        for index in indices:
            self._shards.members[index].gradient.zero_()
            self._local.pop(index, None)

    def unscale(self, indices: Sequence[int], found_inf: torch.Tensor, scale: torch.Tensor) -> None:
        """Multiply gradients by `scale`; `found_inf` is 1.0 if any rank's are not finite."""
        own = dict(self.own())
        for index in indices:
            found_inf.masked_fill_(~own[index].isfinite().all(), 1.0)
            own[index].mul_(scale.to(own[index].dtype))
        with communicating("asking all ranks for gradients that are not finite"):
            self._exchange.communicator.all_reduce(found_inf, dist.ReduceOp.MAX).wait()
