"""Run a cut backward: gates, the autograd nodes that each release one section's gradients.

It compiles nothing and cuts nothing.

[Note: tokens, gates and runs]
A *gate* is the autograd node of a backward section; only the first section has none, and runs in
AOTAutograd's own node. A gate takes the arguments of the forward whose gradients its section makes,
so that autograd knows where they go, and returns only a *token*: a tensor of one element that links
gates in a chain that ends in AOTAutograd's node.

    forward:    token -> gate 2 -> gate 1 -> compiled forward -> outputs
                           ^          ^            ^
                         w, b       u, v         s, t, and all other arguments

    backward:   section 0 -> s, t accumulate -> section 1 -> u, v accumulate -> section 2 -> ...

The first section returns a *handle* as the token's gradient: a tensor that carries the *run*, the
list of values on which the other sections of this one backward work. The last item of a run says
which outputs of the forward have gradients. Autograd gives the handle to gate 1, which passes it on
to gate 2, and so on. Accumulation comes before any gate, because autograd runs AccumulateGrad nodes
first; so DDP's hooks launch the allreduce of a bucket before the next section starts. An abandoned
backward drops the handle, which frees the run's values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddpopt import _events, _torch
from ddpopt._events import Label
from ddpopt.split.backward.facts import ANY

TOKEN_DTYPE = torch.float32  # whatever the default is: autograd would convert a handle that differs
Boxed = Callable[[list[Any]], Sequence[Any]]
Run = list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSection:
    """A section as it is run; the numbers are those of `SectionGraph`.

    `call` takes its values as a list, which it empties. Its gradients come in the order of
    `releases`. `descent` has, as bits, the outputs that each descends from; if none of these has a
    gradient, None is released. If autocast was on in forward, `call` runs `without_autocast`:
    all casts are in the graph already. `label` says which section it is.
    """

    call: Boxed
    takes: tuple[int, ...]
    keeps: tuple[int, ...]
    drops: tuple[int, ...]
    releases: tuple[int, ...]
    descent: tuple[int, ...]
    label: Label
    without_autocast: bool = False

    def run(self, run: Run) -> Sequence[Any]:
        """Run this section of a backward; return its gradients."""
        listener = _events.listening()
        if listener is None:
            return self._run(run)
        with listener.section(self.label, "backward"):
            return self._run(run)

    def _run(self, run: Run) -> Sequence[Any]:
        values = [run[slot] for slot in self.takes]
        for slot in self.drops:
            run[slot] = None
        if self.without_autocast:
            with _torch.no_autocast():
                made = self.call(values)
        else:
            made = self.call(values)
        num_kept = len(self.keeps)
        for slot, value in zip(self.keeps, made, strict=False):
            run[slot] = value
        given = run[-1]
        return [
            _in_own_memory(gradient) if descent & given else None
            for gradient, descent in zip(made[num_kept:], self.descent, strict=True)
        ]


def _in_own_memory(gradient: Any) -> Any:
    """Return a sparse gradient with rows of its own, and anything else as it is.

    Its rows can be a value that a later section reads, and DDP divides them in place. No graph can
    express the copy: Inductor removes copies of sparse tensors.
    """
    if isinstance(gradient, torch.Tensor) and gradient.layout is not torch.strided:
        return gradient.clone()
    return gradient


def run_first_section(
    section: CompiledSection,
    arguments: Sequence[int | None],
    token_argument: int,
    num_kept: int,
    device: torch.device,
    has_descent: bool,
) -> Boxed:
    """Return what AOTAutograd is to run as its backward: one section, and the start of a run.

    `arguments` gives the argument to which each gradient that AOTAutograd expects belongs;
    `num_kept` is how many values all sections keep; if it `has_descent`, sections ask which outputs
    have gradients.
    """
    places = {argument: place for place, argument in enumerate(arguments)}
    released = [places[argument] for argument in section.releases]
    token_place = places[token_argument]

    def backward(inputs: list[Any]) -> list[Any]:
        given = getattr(_torch.autograd_node(), "ddpopt_given", ANY) if has_descent else ANY
        run: Run = [*inputs, *[None] * num_kept, given]
        inputs.clear()
        gradients: list[Any] = [None] * len(arguments)
        for place, gradient in zip(released, section.run(run), strict=True):
            gradients[place] = gradient
        gradients[token_place] = handle = torch.zeros(1, device=device, dtype=TOKEN_DTYPE)
        handle.ddpopt_run = run  # type: ignore[attr-defined]
        return gradients

    return _torch.boxed(backward)


def _note_given(num_outputs: int, gradients: Sequence[torch.Tensor | None]) -> None:
    """Note for the node that is about to run which of its outputs have gradients.

    If it has more or fewer than expected, it is not known which is which: all count as given.
    """
    given = ANY
    if len(gradients) == num_outputs:
        given = sum(1 << i for i, gradient in enumerate(gradients) if gradient is not None)
    _torch.autograd_node().ddpopt_given = given


class Gate(torch.autograd.Function):
    """See [Note: tokens, gates and runs]."""

    @staticmethod
    def forward(
        ctx: Any, section: CompiledSection, is_last: bool, token: torch.Tensor, *_arguments: Any
    ) -> torch.Tensor:
        """Return the token for the next gate. `is_last` says that no section runs after this."""
        ctx.set_materialize_grads(False)
        ctx.section, ctx.is_last = section, is_last
        return torch.empty_like(token)

    @staticmethod
    def backward(ctx: Any, handle: torch.Tensor | None) -> tuple[Any, ...]:
        """Run the section, release its gradients, and pass on the run."""
        section: CompiledSection = ctx.section
        if handle is None:
            return (None, None, None, *[None] * len(section.releases))
        run: Run = handle.ddpopt_run  # type: ignore[attr-defined]
        if torch.is_grad_enabled():
            gradients = refuse_double_backward(lambda: section.run(run), handle)
        else:
            gradients = section.run(run)
        return (None, None, None if ctx.is_last else handle, *gradients)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, make: Callable[[], Sequence[Any]], *_sources: torch.Tensor) -> Any:
        return tuple(make())

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> Any:
        raise RuntimeError(
            "torch.compile with aot_autograd does not currently support double backward"
        )


# Function.apply checks each argument for functorch's wrappers, which never reach a compiled graph,
# and takes a third of a gate's time for that; its base class only applies.
_gate: Callable[..., torch.Tensor] = super(torch.autograd.Function, Gate).apply
# `(make, *sources)`: returns the gradients that `make` returns, so that differentiating them
# raises, as with AOTAutograd's. Autograd finds out when it is asked for gradients of `sources`, or
# of what they were made from.
refuse_double_backward: Callable[..., Sequence[torch.Tensor | None]] = _Once.apply


class GatedGraph:
    """The compiled forward of a graph, with a gate for each backward section after the first.

    It has the signature of Dynamo's graph. `compiled` takes the token as an additional argument and
    returns an additional output. `num_outputs` is how many outputs its autograd node should have
    if sections ask which of them have gradients, and 0 if none asks.
    """

    def __init__(
        self,
        compiled: Callable[..., Sequence[Any]],
        further: Sequence[CompiledSection],
        device: torch.device,
        num_outputs: int,
    ) -> None:
        self._compiled = compiled
        # The last section's gate is made first: autograd runs later-made nodes first.
        self._gates = [(section, section is further[-1]) for section in reversed(further)]
        self._device = device
        self._note_given = functools.partial(_note_given, num_outputs) if num_outputs else None

    def __call__(self, *args: Any) -> Sequence[Any]:
        token = torch.empty(1, device=self._device, dtype=TOKEN_DTYPE, requires_grad=True)
        for section, is_last in self._gates:
            token = _gate(section, is_last, token, *[args[i] for i in section.releases])
        *outputs, token = self._compiled(*args, token)
        if self._note_given is not None and token.grad_fn is not None:
            token.grad_fn.register_prehook(self._note_given)
        return outputs
