"""What runs of a cut backward: compiled sections, and the gates in which all but the first run.

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
values on which the other sections of this one backward work. Autograd gives the handle to
gate 1, which passes it on to gate 2, and so on. Accumulation comes before any gate, because
autograd runs AccumulateGrad nodes first; so DDP's hooks launch the allreduce of a bucket before the
next section starts. An abandoned backward drops the handle, which frees the run's values.

Each section runs once in a run, when it is its turn. Whoever hooks autograd's nodes sees the handle
too, and may lose it, or keep it and give it to a gate in another backward: the gate refuses that.

In the first steps gradients arrive behind all sections, in an order of ours: see `runner.py`.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ddpopt import _torch
from ddpopt._indices import Argument, Slot
from ddpopt.errors import HookError
from ddpopt.split.backward import Flow
from ddpopt.steps import sections
from ddpopt.steps.sections import Label

TOKEN_DTYPE = torch.float32  # whatever the default is: autograd would convert a handle that differs

# Takes its values as a list, which it empties.
Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(slots=True)
class Run:
    """The values of one backward by slot, see `Flow`.

    `versions` says of each slot that a section watches how often its tensor had been written to
    when the backward began. `num_sections_begun` counts a section that raised too: it does not run
    again. All sections run in `context`, the one in which the first section runs.
    AOTAutograd runs its backward in the context of whoever called `backward()`, so that settings of
    torch that are context variables hold in the backward. In autograd's thread for its device a
    gate would find other settings.
    """

    values: list[Any]
    versions: dict[Slot, int]
    num_sections_begun: int = 0
    context: contextvars.Context = field(default_factory=contextvars.copy_context)


def new_token(device: torch.device) -> torch.Tensor:
    """The token that a forward begins with; at compile time, an example of one.

    It requires grad, as what gates return does: AOTAutograd has to give it a gradient, the handle.
    """
    # Not left uninitialised: `nan_asserts` look at it, and deterministic algorithms fill it.
    return torch.zeros(1, device=device, dtype=TOKEN_DTYPE, requires_grad=True)


# ---- Sections --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSection:
    """A section of a backward as it is run."""

    # Returns what the section keeps, then its gradients, in the order of `flow.releases`.
    call: Boxed
    flow: Flow
    label: Label
    # Autocast was on in forward, and `call` runs without it: all casts are in the graph already. A
    # call that the forward makes where autocast is off, and backward makes again, has none; in a
    # `backward()` under autocast it would be cast.
    without_autocast: bool = False

    def run(self, run: Run) -> Sequence[Any]:
        """Run this section of a backward, in sight of a listener or profiler; return gradients.

        They are in the order of `flow.releases`.
        """
        listener = sections.find_listener()
        if listener is None:
            return self._run(run)
        with listener(self.label, "backward"):
            return self._run(run)

    def _run(self, run: Run) -> Sequence[Any]:
        """Run this section, and tell no listener."""
        run.num_sections_begun += 1  # also of one that raises: no gate lets it run again
        if self.flow.watches:
            self._check_unwritten(run)
        values = [run.values[slot] for slot in self.flow.takes]
        for slot in self.flow.drops:
            run.values[slot] = None  # so that the call, which empties `values`, may free it
        # All casts of the forward are in the graph; `backward()` itself may be called in autocast.
        if self.without_autocast:
            with _torch.no_autocast():
                returned = self.call(values)
        else:
            returned = self.call(values)
        num_kept = len(self.flow.keeps)
        for slot, value in zip(self.flow.keeps, returned[:num_kept], strict=True):
            run.values[slot] = value
        return [_in_own_memory(gradient) for gradient in returned[num_kept:]]

    def _check_unwritten(self, run: Run) -> None:
        """Raise HookError if what this section reads was written to since the backward began."""
        watched = self.flow.watches
        versions = _torch.versions(run.values[slot] for slot in watched)
        for slot, version in zip(watched, versions, strict=True):
            # Eager refuses a backward whose buffer a hook has written to (splits.md, fault 8).
            if version != run.versions[slot]:
                value = run.values[slot]
                raise HookError(
                    f"backward section {self.label.section} of graph {self.label.graph} is yet to "
                    f"read a tensor of shape {list(value.shape)} ({value.dtype}) to which "
                    "something has written in place during backward, as a hook may do to a "
                    "buffer, an input or an output; have the hook assign a new tensor or write "
                    "after backward, or compile with options={'enabled': False}. Eager mode "
                    "refuses this too, unless the program had copied the tensor: torch.compile "
                    "may leave such a copy out"
                )


def _in_own_memory(gradient: Any) -> Any:
    """A sparse gradient with rows of its own, and anything else as it is.

    Its rows can be a value that a later section reads, and DDP divides them in place (splits.md,
    fault 12). No graph can express the copy: Inductor removes copies of sparse tensors.
    """
    if isinstance(gradient, torch.Tensor) and gradient.layout is not torch.strided:
        return gradient.clone()
    return gradient


def first_section_as_backward(
    section: CompiledSection,
    argument_of_output: Sequence[Argument | None],
    token_argument: Argument,
    num_kept: int,
    watched: Collection[Slot],
    device: torch.device,
) -> Boxed:
    """A function for AOTAutograd to run as its backward: it begins a run, with the first section.

    `argument_of_output` gives the argument to which each gradient that AOTAutograd expects belongs,
    None for an output that is no gradient; `num_kept` is how many values all sections keep, and
    `watched` are the slots that some watch.
    """
    output_of = {argument: output for output, argument in enumerate(argument_of_output)}
    gradient_outputs = [output_of[argument] for argument in section.flow.releases]
    token_output = output_of[token_argument]

    def backward(inputs: list[Any]) -> list[Any]:
        """Return what AOTAutograd expects, None for gradients that later sections make."""
        versions = _torch.versions(inputs[slot] for slot in watched)
        # The backward's inputs have the first slots, and what sections keep has those behind. The
        # run also notes the present context, that of `backward()`'s caller.
        run = Run([*inputs, *[None] * num_kept], dict(zip(watched, versions, strict=True)))
        inputs.clear()  # the run alone holds them now, until a section drops them
        gradients: list[Any] = [None] * len(argument_of_output)
        for output, gradient in zip(gradient_outputs, section.run(run), strict=True):
            gradients[output] = gradient
        gradients[token_output] = handle = torch.zeros(1, device=device, dtype=TOKEN_DTYPE)
        handle.ddpopt_run = run  # type: ignore[attr-defined]  # see [Note: tokens, gates and runs]
        return gradients

    return _torch.boxed(backward)


# ---- Gates -----------------------------------------------------------------------------------


class Gate(torch.autograd.Function):
    """See [Note: tokens, gates and runs]."""

    @staticmethod
    def forward(
        ctx: Any, section: CompiledSection, is_last: bool, token: torch.Tensor, *_arguments: Any
    ) -> torch.Tensor:
        """Make the section's autograd node; return the token for the next node in forward.

        That is the gate of the section before this one, or, for section 1, the compiled forward.
        `is_last` says that no section runs after this one. The section releases the gradients of
        `_arguments`.
        """
        ctx.set_materialize_grads(False)  # zeros in place of a missing handle carry no run either
        ctx.section, ctx.is_last = section, is_last
        return token.detach()  # in the token's memory: no kernel fills another

    @staticmethod
    def backward(ctx: Any, handle: torch.Tensor | None) -> tuple[Any, ...]:
        """Run the section, release its gradients, and pass on the run by its handle."""
        section: CompiledSection = ctx.section
        run: Run | None = getattr(handle, "ddpopt_run", None)
        # Without the handle this and later sections would give no gradients (splits.md, fault 14).
        if run is None or run.num_sections_begun != section.label.section:
            # The schedules that the message names run a stage's backward to its input
            # (`stage_backward_input`), and later the nodes on its way once more, with the gradients
            # that these got (`stage_backward_weight`). Sections that could run again would not
            # help: a weight has edges from two nodes, the graph's own and a gate, and torch then
            # has it in two groups, both of which add to its gradient (`get_param_groups`, 2.13).
            raise HookError(
                f"backward section {section.label.section} of graph {section.label.graph} has got "
                "another gradient than ddpopt's own, by which the section before it passes on "
                "values. Either a hook on an autograd node (grad_fn.register_hook or "
                "register_prehook, or the old Module.register_backward_hook) has returned "
                "gradients in place of those that it got, or nodes run again with gradients that "
                "were kept, as in zero-bubble schedules of torch.distributed.pipelining; use "
                "Tensor.register_hook or Module.register_full_backward_hook, or compile with "
                "options={'split': 'forward'}"
            )
        # Autograd may run this node in a thread of its own, where the context variables of the
        # caller of `backward()` are not set; the run has kept the caller's context.
        if torch.is_grad_enabled():  # create_graph=True: differentiating what is returned raises
            gradients = refuse_double_backward(lambda: run.context.run(section.run, run), handle)
        else:
            gradients = run.context.run(section.run, run)
        # The last gate's token is a leaf: its `grad` would keep the handle, and so the run.
        return (None, None, None if ctx.is_last else handle, *gradients)


class _NoDoubleBackward(torch.autograd.Function):
    """See `refuse_double_backward`."""

    @staticmethod
    def forward(_ctx: Any, make: Callable[[], Sequence[Any]], *_sources: torch.Tensor) -> Any:
        # A section may return a gradient that the program passed in, with the autograd history that
        # it has in the program.
        return tuple(g.detach() if g is not None and g.requires_grad else g for g in make())

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> Any:
        raise RuntimeError(
            "torch.compile with aot_autograd does not currently support double backward"
        )


# Function.apply checks each argument for functorch's wrappers, which never reach a compiled graph,
# and takes a third of a gate's time for that; its base class only applies. A torch without such a
# base class costs that time, and nothing else.
_gate: Callable[..., torch.Tensor]
_gate = getattr(super(torch.autograd.Function, Gate), "apply", Gate.apply)
# `(make, *sources)`: returns the gradients that `make` returns, so that differentiating them
# raises, as with AOTAutograd's. It raises when autograd is asked for gradients of `sources`, or of
# tensors from which these were computed.
refuse_double_backward: Callable[..., Sequence[torch.Tensor | None]] = _NoDoubleBackward.apply


class GatedGraph:
    """The compiled forward of a graph, with a gate for each backward section after the first.

    It has the signature of Dynamo's graph. `compiled` takes the token as an additional argument and
    returns an additional output.
    """

    def __init__(
        self,
        compiled: Callable[..., Sequence[Any]],
        further: Sequence[CompiledSection],
        device: torch.device,
    ) -> None:
        """Put gates around a compiled forward, one for each of the `further` backward sections.

        There are none if the backward stays whole. The gate of the last section takes the token
        that the forward begins with, a leaf, in whose `grad` autograd would keep a handle: so that
        gate passes none on.
        """
        self._compiled = compiled
        # The gates are in reverse order of sections: each takes the token of the section after it.
        self._gates = [(section, section is further[-1]) for section in reversed(further)]
        self._device = device

    def __call__(self, *args: Any) -> Sequence[Any]:
        token = new_token(self._device)
        for section, is_last in self._gates:
            arguments = [args[argument] for argument in section.flow.releases]
            token = _gate(section, is_last, token, *arguments)
        *outputs, _token = self._compiled(*args, token)
        return outputs
