"""One graph as Dynamo traced it under a DDP module: what is read of it before anything is cut.

`read_graph` reads what both splits need. What the forward is like is read when a forward is cut
(`read_forward` in facts.py), so that a private name which only that needs costs no cut of a
backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._indices import Argument, Call, ParameterIndex, numbered
from ddpopt.errors import Reason, TorchDriftError
from ddpopt.options import Options
from ddpopt.reducer import Parameter
from ddpopt.split import state
from ddpopt.split.arrival import OthersArrive, may_share_code, module_path_of
from ddpopt.split.cut import Cut
from ddpopt.split.facts import parameters_of, read_uses
from ddpopt.split.forward import copy_for_cutting
from ddpopt.split.nodes import call_nodes, may_communicate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DynamoGraph:
    """A graph under a DDP module.

    It holds no tensor of the first batch, which would live on as long as the compiled code:
    AOTAutograd may keep the `BackwardCutter` that has this.
    """

    gm: fx.GraphModule  # Dynamo's own, which Dynamo keeps and goes on to use
    copy: fx.GraphModule  # of which a cut forward is made
    name: str
    options: Options
    ddp_state: state.DDPState

    num_inputs: int
    # For each argument that is a parameter, of DDP or not: whether it requires grad now.
    is_trained: Mapping[Argument, bool]
    # The parameters that the Reducer reduces, whichever graphs use them.
    reduced: Sequence[Parameter]
    # The argument that brings in each parameter of `reduced` that is an input of the graph.
    argument_of: Mapping[ParameterIndex, Argument]
    # The DDP parameters behind each node of `copy`; several where a node stands for a module.
    indices_of: Mapping[fx.Node, Sequence[ParameterIndex]]

    # Backward is forward reversed: parameters of graphs that run after this one in the module's
    # forward arrive before its own, those of graphs that run before it arrive after.
    arrives_before: Sequence[Parameter]
    arrives_after: Sequence[Parameter]
    # When the gradients arrive of parameters that no known graph uses.
    others: OthersArrive
    # The parameters that the root module has itself, rather than one of its submodules: where they
    # are registered does not tell when they are used, see `OthersArrive`.
    of_root: Sequence[ParameterIndex]

    # The first differentiable use of each parameter, at which its gradient is final in backward. As
    # `read_uses` has it: without parameters that a graph before this one uses too.
    first_use: Mapping[ParameterIndex, Call]
    # Whether the graph, or its backward, may exchange data with other ranks.
    communicates: bool
    # The record of the graph so far: without sections, buckets or reason.
    empty_cut: Cut
    # Whether autocast is on in the forward, see `CompiledSection.without_autocast`.
    was_autocast_on: bool

    @property
    def final_elsewhere(self) -> set[ParameterIndex]:
        """The parameters that graphs before this one use too: their gradients are final there."""
        return {parameter.index for parameter in self.arrives_after}

    def may_fall_back_for(self, reason: Reason) -> bool:
        """Whether the graph may be cut in another way, or not at all, for this reason.

        A graph that may communicate may be only for a reason that holds on all ranks or on none: a
        rank that does not cut the graph as others do issues the graph's collectives and DDP's
        allreduces in another order.
        """
        return reason.is_alike or not self.communicates


def new_cut(gm: fx.GraphModule, options: Options) -> Cut:
    """The record of a graph that is yet to be cut: no sections, no buckets, no reason."""
    calls = call_nodes(gm.graph)
    # A graph that stays whole because torch has moved a name has a record too. Where the name is
    # one that `may_communicate` needs, the number stays 0, by which ranks are not compared.
    num_collectives = 0
    with contextlib.suppress(TorchDriftError):
        num_collectives = sum(map(may_communicate, calls))
    return Cut(
        graph=_torch.graph_name(gm),
        inner=options.inner_name,
        num_nodes=len(calls),
        num_collectives=num_collectives,
    )


def read_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ddp: DistributedDataParallel,
    options: Options,
) -> DynamoGraph:
    """Read Dynamo's graph, and what is known of the graphs around it.

    Raises:
        TorchDriftError: torch has moved a private name that is needed.
    """
    _torch.check_dynamo_graph(gm)
    copied = copy_for_cutting(gm)
    name, ddp_state = _torch.graph_name(gm), state.get(ddp)

    # The Reducer's parameters, and which of them this graph uses. The Reducer keeps parameters that
    # were frozen after it was made; they get no gradient, so they count as not used.
    reduced = _torch.reducer_parameters(ddp)
    trained = {tensor: p for tensor, p in reduced.items() if tensor.requires_grad}
    indices_of = parameters_of(copied, example_inputs, trained)
    # In the module as it is now: a parameter that has left it has no path.
    path_by_tensor = _torch.names_now(ddp)
    path_of = {p.index: path_by_tensor.get(tensor) for tensor, p in reduced.items()}
    argument_of: dict[ParameterIndex, Argument] = {}
    path_of_input: dict[fx.Node, str] = {}
    for argument, placeholder in numbered(Argument, copied.graph.find_nodes(op="placeholder")):
        # One at most: of the nodes in `indices_of`, only calls of whole modules have several.
        for index in indices_of.get(placeholder, ()):
            argument_of[index] = argument
            path = path_of[index]
            if path is not None:
                path_of_input[placeholder] = path

    # Where the graph stands among others under the same module.
    arrives_before, arrives_after = ddp_state.arrival_around(name)
    module_path = module_path_of(path_of_input)  # of the module whose forward Dynamo traced
    is_of_root = _torch.is_whole_forward(module_path)
    others = OthersArrive.for_graph(
        begins_forward=not (ddp_state.may_have_begun_forward or _torch.follows_graph_break()),
        ends_forward=is_of_root and not _torch.ends_in_graph_break(gm),
        # DDP allows unused ones with `find_unused_parameters` too, where no bucket follows arrival.
        may_be_unused=ddp.static_graph,
    )
    # Parameters of the root itself are often the loss's, and their gradients arrive first. The
    # wrapper that `torch.compile` puts around the root has no parameter itself.
    root = _torch.unwrap_compiled(ddp.module)
    of_root = {p.index for tensor in root.parameters(recurse=False) if (p := reduced.get(tensor))}

    # A parameter that an earlier graph uses first is final there, and its use here is no first one.
    uses = read_uses(copied, indices_of, {p.index for p in arrives_after})
    is_shared = may_share_code(ddp.module, module_path)
    return DynamoGraph(
        gm=gm,
        copy=copied,
        name=name,
        options=options,
        ddp_state=ddp_state,
        num_inputs=len(example_inputs),
        is_trained={
            argument: value.requires_grad
            for argument, value in numbered(Argument, example_inputs)
            if isinstance(value, nn.Parameter)
        },
        reduced=tuple(reduced.values()),
        argument_of=argument_of,
        indices_of=indices_of,
        arrives_before=arrives_before,
        arrives_after=arrives_after,
        others=others,
        of_root=sorted(of_root),
        first_use=uses.first_use,
        communicates=any(uses.communicates),
        empty_cut=dataclasses.replace(new_cut(gm, options), is_shared=is_shared),
        was_autocast_on=_torch.is_autocast_on(),
    )
