"""A property of all of `split`: the parameters that get gradients are those that do unsplit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.errors import Reason
from ddpopt.split.forward import find_passing_gradients
from ddpopt.split.nodes import call_nodes
from tests.support.beside import Beside, compiled, mean_square
from tests.support.cuts import only_cut
from tests.support.graphs import Capture, forward_of
from tests.support.models import batches
from tests.support.on_ranks import gather, on_ranks
from tests.support.ranks import error_of

WIDTH = 8
Forward = Callable[[Any, torch.Tensor], torch.Tensor]


def _detached(layers: Any, x: torch.Tensor) -> torch.Tensor:
    x = layers[0](x).tanh()
    return layers[3](x + layers[2](layers[1](x)).detach())


def _compared(layers: Any, x: torch.Tensor) -> torch.Tensor:
    x = layers[0](x).tanh()
    mask = layers[1](x)
    return layers[3](layers[2](x * 2) * (mask.abs() > 0.3))


def _used_without_grad(layers: Any, x: torch.Tensor) -> torch.Tensor:
    x = layers[0](x).tanh()
    scale = layers[1](x)
    x = layers[2](x)
    with torch.no_grad():
        scale = scale.abs().mean()
    return layers[3](x * scale)


class Layers(nn.Module):
    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layers, x)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that changes weights whose gradients are zeros, and not those without one."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)


def _beside(forward: Forward, split: str, **ddp_options: Any) -> Beside:
    """A model beside eager DDP, which is cut behind the second layer, after three steps."""
    ddp_options["bucket_cap_mb"] = 500 / 2**20
    beside = Beside(Layers(forward), ddp_options=ddp_options, make_optimizer=_adamw, split=split)
    beside.train(batches(0, [(4, WIDTH)] * 3))
    return beside


@pytest.mark.quick("_detached-options0-forward")
@pytest.mark.parametrize("split", ["forward", "backward"])
@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("forward", [_detached, _compared, _used_without_grad])
def test_parameters_without_a_gradient_keep_none(
    one_rank: None, forward: Forward, options: dict[str, Any], split: str
) -> None:
    """Zeros in place of none would have AdamW's weight decay change them."""
    beside = _beside(forward, split, **options)
    assert any(parameter.grad is None for parameter in beside.ddp.parameters())
    assert beside.cut.split == split
    if forward is _detached and split == "backward" and "static_graph" in options:
        # The two layers that have gradients fill one bucket; nothing is computed for the other.
        assert beside.cut.fallback is Reason.COMPLETE_TOGETHER
    else:
        assert beside.cut.fallback is None
        assert len(beside.cut.sections) >= 2


def test_gradients_arrive_where_vmap_alone_uses_a_value_behind_a_cut(one_rank: None) -> None:
    """The scan of a state space model does so: its rate of decay once got zeros."""

    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        rate = layers[0](x).sigmoid()
        return layers[3](torch.vmap(torch.mul)(layers[2](layers[1](x)), rate))

    assert len(_beside(forward, "forward").cut.sections) == 2


class TwoHeads(nn.Module):
    """A trunk and two heads, each an output. `aside` keeps the second where DDP does not see it."""

    def __init__(self, aside: bool) -> None:
        super().__init__()
        self.trunk, self.first, self.second = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(3)
        )
        self.aside = aside

    def forward(self, x: torch.Tensor) -> Any:
        x = self.trunk(x)
        first, second = self.first(x), self.second(x)
        if self.aside:
            self.kept = second
            return first
        return {"second": second, "first": first}


@on_ranks(2)
@pytest.mark.quick("False-find_unused_parameters-aot_eager")
@pytest.mark.parametrize(
    ("aside", "option", "inner"),
    [
        (False, "find_unused_parameters", "aot_eager"),
        (False, "find_unused_parameters", "inductor"),
        (True, "find_unused_parameters", "aot_eager"),
        (True, "static_graph", "aot_eager"),  # eager DDP refuses it with an output that it sees
    ],
)
def test_parameters_behind_outputs_that_the_loss_does_not_use_get_zeros_as_unsplit(
    rank: int, aside: bool, option: str, inner: str
) -> None:
    """AOTAutograd fills in zeros for outputs without a gradient. Any rank's use counts."""
    # Inductor may add a product to another one in one call or in two.
    digits = 1e-5 if inner == "inductor" else 0
    close = functools.partial(torch.testing.assert_close, rtol=digits, atol=digits / 100)
    split, unsplit = (
        _train_first_head(rank, aside, option, inner=inner, split="backward", enabled=is_split)
        for is_split in (True, False)
    )
    for gradients, expected in zip(split, unsplit, strict=True):
        assert len(gradients) == 12, "four of the trunk and of each head"
        close(gradients, expected)
    assert not split[0]["second.0.weight"].any()


def _train_first_head(
    rank: int, aside: bool, option: str, *, enabled: bool, **options: Any
) -> list[dict[str, torch.Tensor]]:
    """The gradients of each step, of a loss of the first head; on rank 1 at last of both."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(TwoHeads(aside), bucket_cap_mb=200 / 2**20, **{option: True})
    model = compiled(ddp, enabled=enabled, **options)
    optimizer = _adamw(ddp.parameters())
    gradients = []
    for step, x in enumerate(batches(rank, [(4, WIDTH)] * 4)):
        optimizer.zero_grad()
        output = model(x)
        loss = mean_square(output if aside else output["first"])
        if step == 3 and rank == 1 and not aside:
            loss = loss + mean_square(output["second"])
        loss.backward()
        optimizer.step()
        named = ddp.module.named_parameters()
        gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
    num_sections = len(only_cut(ddp).sections)
    assert num_sections >= 3 if enabled else num_sections == 0
    return gradients


class Apart(nn.Module):
    """Two layers, each with an output of its own; to the second a third adds, which is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.detached = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x).tanh(), self.second(x).tanh() + self.detached(x).detach()


def _apart(how: str) -> tuple[DistributedDataParallel, Any]:
    ddp = DistributedDataParallel(Apart(), bucket_cap_mb=200 / 2**20, static_graph=True)
    return ddp, compiled(ddp, **({"enabled": False} if how == "unsplit" else {"split": how}))


@on_ranks(2)
@pytest.mark.quick("unsplit-False")
@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("how", ["unsplit", "backward", "forward"])
def test_of_two_losses_with_a_backward_each_ddp_reduces_the_first_alone(
    rank: int, how: str, retain_graph: bool
) -> None:
    """The second fails, or with `retain_graph` stays each rank's own. A cut forward has both."""
    ddp, model = _apart(how)
    weights = [ddp.module.first.weight, ddp.module.second.weight]
    (x,) = batches(rank, [(4, WIDTH)])
    with torch._functorch.config.patch(donated_buffer=False):  # else unsplit retains no graph
        for _ in range(3):
            ddp.zero_grad()
            (model(x)[0] + model(x)[1]).sum().backward()
        assert how == "unsplit" or len(only_cut(ddp).sections) > 1
        means = [weight.grad.clone() for weight in weights]
        ddp.zero_grad()
        first, second = model(x)
        first.sum().backward(retain_graph=retain_graph)
        error = error_of(second.sum().backward)
    is_mean = [torch.allclose(w.grad, mean) for w, mean in zip(weights, means, strict=True)]
    assert is_mean == [True, how == "forward"]
    assert ("a second time" in error) is not (retain_graph or how == "forward")


@on_ranks(2)
@pytest.mark.quick("unsplit")
@pytest.mark.parametrize("how", ["unsplit", "backward", "forward"])
def test_compiled_steps_do_not_mix_with_eager_ones_where_a_static_graph_detaches_a_layer(
    rank: int, how: str
) -> None:
    """Compiled code marks the layer ready, eager does not. Here it has no section of its own."""
    compiled_first = _mix_steps(rank, how, (True, True, False, False))
    assert compiled_first[:3] == ["reduced", "reduced", "unreduced"]
    assert "finished reduction" in compiled_first[3]
    eager_first = _mix_steps(rank, how, (False, False, True))
    assert eager_first[:2] == ["reduced", "reduced"]
    assert "graph has changed" in eager_first[2]


def _mix_steps(rank: int, how: str, are_compiled: Sequence[bool]) -> list[str]:
    """Return of each step whether ranks have one gradient, or the error that ended training."""
    torch._dynamo.reset()
    ddp, model = _apart(how)
    (x,) = batches(rank, [(4, WIDTH)])
    outcomes = []
    for is_compiled in are_compiled:
        ddp.zero_grad()
        run = model if is_compiled else ddp
        error = error_of(lambda run=run: sum(run(x)).sum().backward())
        if error != "nothing":
            return [*outcomes, error]
        assert how == "unsplit" or not is_compiled or len(only_cut(ddp).sections) > 1
        one, other = gather(ddp.module.first.weight.grad)
        outcomes.append("reduced" if torch.equal(one, other) else "unreduced")
    return outcomes


def _passing(forward: Forward) -> dict[str, bool]:
    torch._dynamo.reset()
    capture = Capture()
    module = forward_of(forward, (4, 4), (4, 4))
    torch.compile(module, backend=capture, fullgraph=True)(torch.randn(4, 4))
    passing = find_passing_gradients(capture.gm.graph)
    return {node.name: node in passing for node in call_nodes(capture.gm.graph)}


def test_what_is_only_detached_passes_nothing_back() -> None:
    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        dead = (x @ p[0]).relu()
        return (x @ p[1]) * dead.detach().sum() * dead.argmax()

    names = [name for name, is_passing in _passing(forward).items() if is_passing]
    assert names == ["matmul_1", "mul", "mul_1"]


def test_what_vmap_does_passes_gradients_back() -> None:
    """Within a transform of functorch Dynamo's values do not say that they require any."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(torch.mul)(x, p[0].exp()) @ p[1]

    made_by_exp, *_ = _passing(forward).values()
    assert made_by_exp


def test_what_is_written_into_memory_counts_as_passing() -> None:
    """Other nodes may read the memory, and pass gradients back."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(4, 4)
        rows[0] = (x @ p[0])[0]
        other = torch.zeros(4, 4)
        other.view(16).add_((x @ p[1]).view(16))
        return rows + other

    passing = [is_passing for name, is_passing in _passing(forward).items() if "zeros" not in name]
    assert len(passing) > 4
    assert all(passing)


@on_ranks(2)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_deep_copy_of_a_static_graph_that_has_trained_is_not_reduced(
    rank: int, is_compiled: bool
) -> None:
    """The copy has DDP's note that the first backward is over, and a Reducer that awaits one."""
    ddp = DistributedDataParallel(nn.Linear(4, 4), static_graph=True)
    for _ in range(3):
        ddp(torch.ones(2, 4)).sum().backward()
    copied = copy.deepcopy(ddp)
    run = compiled(copied) if is_compiled else copied
    for _ in range(3):
        copied.zero_grad()
        run(torch.full((2, 4), rank + 1.0)).sum().backward()
        first, second = gather(copied.module.weight.grad)
        assert not torch.equal(first, second)
