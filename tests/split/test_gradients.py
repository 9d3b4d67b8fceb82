"""A property of all of `split`: the parameters that get gradients are those that do unsplit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.errors import Reason
from ddpopt.split.cut import Cut
from ddpopt.split.forward import find_passing_gradients
from ddpopt.split.nodes import call_nodes
from tests.support.cuts import only_cut
from tests.support.graphs import Capture, forward_of
from tests.support.models import batches
from tests.support.ranks import Ranks, error_of

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


def _train(
    forward: Forward, options: dict[str, Any], split: str | None
) -> tuple[list[str], dict[str, torch.Tensor], tuple[Cut, ...]]:
    """Return which parameters have no gradient, all parameters, and the cuts of the graphs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ddp = model = DistributedDataParallel(Layers(forward), **options)
    if split is not None:
        chosen = {"inner": "aot_eager", "split": split}
        model = torch.compile(ddp, backend="ddpopt", options=chosen)
    optimizer = torch.optim.AdamW(ddp.parameters(), weight_decay=0.5)
    for x in batches(0, [(4, WIDTH)] * 3):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    named = dict(ddp.module.named_parameters())
    without = [name for name, parameter in named.items() if parameter.grad is None]
    return without, named, ddpopt.explain(ddp).cuts


@pytest.mark.quick("_detached-options0-forward")
@pytest.mark.parametrize("split", ["forward", "backward"])
@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("forward", [_detached, _compared, _used_without_grad])
def test_parameters_without_a_gradient_keep_none(
    one_rank: None, forward: Forward, options: dict[str, Any], split: str
) -> None:
    """Zeros in place of none would have AdamW's weight decay change them."""
    options = {**options, "bucket_cap_mb": 500 / 2**20}  # a cut lies behind the second layer
    expected_without, expected, _ = _train(forward, options, None)
    without, parameters, cuts = _train(forward, options, split)
    assert without == expected_without != []
    (cut,) = cuts
    assert cut.split == split
    if forward is _detached and split == "backward" and "static_graph" in options:
        # The two layers that have gradients fill one bucket; nothing is computed for the other.
        assert cut.fallback is Reason.COMPLETE_TOGETHER
    else:
        assert cut.fallback is None
        assert len(cut.sections) >= 2
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, expected[name])


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


def _train_first_head(
    rank: int, aside: bool, options: dict[str, Any], inner: str, is_split: bool
) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
    """Train on a loss of the first head, and on rank 1 of both in the last step.

    Returns the gradients that there are after each step, and the numbers of sections.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(TwoHeads(aside), **options)
    chosen = {"inner": inner, "split": "backward", "enabled": is_split}
    model = torch.compile(ddp, backend="ddpopt", options=chosen)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1, weight_decay=0.5)
    gradients = []
    for step, x in enumerate(batches(rank, [(4, WIDTH)] * 4)):
        optimizer.zero_grad()
        output = model(x)
        loss = (output if aside else output["first"]).pow(2).mean()
        if step == 3 and rank == 1 and not aside and not ddp.static_graph:
            loss = loss + output["second"].pow(2).mean()
        loss.backward()
        optimizer.step()
        named = ddp.module.named_parameters()
        gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
    return gradients, [len(cut.sections) for cut in ddpopt.explain(ddp).cuts]


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
    ranks: Ranks, aside: bool, option: str, inner: str
) -> None:
    """AOTAutograd fills in zeros for outputs without a gradient. Any rank's use counts."""
    options = {option: True, "bucket_cap_mb": 200 / 2**20}
    split = ranks.run(_train_first_head, aside, options, inner, True)
    unsplit = ranks.run(_train_first_head, aside, options, inner, False)
    for (gradients, sections), (of_unsplit, no_sections) in zip(split, unsplit, strict=True):
        assert sections[0] >= 3
        assert max(no_sections) == 0
        for of_step, expected_of_step in zip(gradients, of_unsplit, strict=True):
            assert of_step.keys() == expected_of_step.keys()
            assert len(of_step) == 12, "four of the trunk and of each head"
            for name, gradient in of_step.items():
                # Inductor may add a product to another one in one call or in two.
                digits = 1e-5 if inner == "inductor" else 0
                torch.testing.assert_close(
                    gradient, expected_of_step[name], rtol=digits, atol=digits / 100
                )
        assert not gradients[0]["second.0.weight"].any()


class Apart(nn.Module):
    """Two layers, each with an output of its own; to the second a third adds, which is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.detached = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x).tanh(), self.second(x).tanh() + self.detached(x).detach()


def _apart(how: str) -> tuple[DistributedDataParallel, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Apart(), bucket_cap_mb=200 / 2**20, static_graph=True)
    chosen = {"enabled": False} if how == "unsplit" else {"split": how}
    return ddp, torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager", **chosen})


@torch._functorch.config.patch(donated_buffer=False)  # else unsplit refuses `retain_graph`
def _take_two_losses(rank: int, how: str, retain_graph: bool) -> tuple[str, list[bool]]:
    """A backward for each: the second one's error, and which layers have the ranks' mean."""
    ddp, model = _apart(how)
    (x,) = batches(rank, [(4, WIDTH)])
    for _ in range(3):
        ddp.zero_grad()
        (model(x)[0] + model(x)[1]).sum().backward()
    assert how == "unsplit" or len(only_cut(ddp).sections) > 1
    module = ddp.module
    means = [layer.weight.grad.clone() for layer in (module.first, module.second)]
    ddp.zero_grad()
    first, second = model(x)
    first.sum().backward(retain_graph=retain_graph)
    error = error_of(second.sum().backward)
    pairs = zip((module.first, module.second), means, strict=True)
    return error, [torch.allclose(layer.weight.grad, mean) for layer, mean in pairs]


@pytest.mark.quick("unsplit-False")
@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("how", ["unsplit", "backward", "forward"])
def test_of_two_losses_with_a_backward_each_ddp_reduces_the_first_alone(
    ranks: Ranks, how: str, retain_graph: bool
) -> None:
    """The second fails, or with `retain_graph` stays each rank's own. A cut forward has both."""
    for error, is_mean in ranks.run(_take_two_losses, how, retain_graph):
        assert is_mean == [True, how == "forward"]
        assert ("a second time" in error) is not (retain_graph or how == "forward")


def _mix_steps(rank: int, how: str, are_compiled: Sequence[bool]) -> list[str]:
    """Return of each step whether ranks have one gradient, or the error that ended training."""
    ddp, model = _apart(how)
    (x,) = batches(rank, [(4, WIDTH)])
    outcomes = []
    for is_compiled in are_compiled:
        ddp.zero_grad()
        run = model if is_compiled else ddp
        error = error_of(lambda run=run: sum(run(x)).sum().backward())
        if error != "nothing":
            return [*outcomes, error.partition(" in ")[0]]
        assert how == "unsplit" or not is_compiled or len(only_cut(ddp).sections) > 1
        gradients = [torch.empty(WIDTH, WIDTH) for _ in range(2)]
        dist.all_gather(gradients, ddp.module.first.weight.grad)
        outcomes.append("reduced" if torch.equal(*gradients) else "unreduced")
    return outcomes


@pytest.mark.quick("unsplit")
@pytest.mark.parametrize("how", ["unsplit", "backward", "forward"])
def test_compiled_steps_do_not_mix_with_eager_ones_where_a_static_graph_detaches_a_layer(
    ranks: Ranks, how: str
) -> None:
    """Compiled code marks the layer ready, eager does not. Here it has no section of its own."""
    compiled_first = ["reduced", "reduced", "unreduced"]
    compiled_first.append("RuntimeError: Expected to have finished reduction")
    eager_first = ["reduced", "reduced", "RuntimeError: Your training graph has changed"]
    for outcomes in ranks.run(_mix_steps, how, (True, True, False, False)):
        assert outcomes == compiled_first
    for outcomes in ranks.run(_mix_steps, how, (False, False, True)):
        assert outcomes == eager_first


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

    passing = _passing(forward)
    assert [name for name, is_passing in passing.items() if is_passing] == [
        "matmul_1",
        "mul",
        "mul_1",
    ]


def test_what_vmap_does_passes_gradients_back() -> None:
    """Within a transform of functorch Dynamo's values do not say that they require any."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(torch.mul)(x, p[0].exp()) @ p[1]

    made_by_exp, *_ = _passing(forward).values()
    assert made_by_exp


def test_gradients_arrive_where_vmap_alone_uses_a_value_behind_a_cut(one_rank: None) -> None:
    """The scan of a state space model does so: its rate of decay once got zeros."""

    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        rate = layers[0](x).sigmoid()
        return layers[3](torch.vmap(torch.mul)(layers[2](layers[1](x)), rate))

    _, expected, _ = _train(forward, {"bucket_cap_mb": 500 / 2**20}, None)
    _, parameters, cuts = _train(forward, {"bucket_cap_mb": 500 / 2**20}, "forward")
    assert [(cut.split, len(cut.sections)) for cut in cuts] == [("forward", 2)]
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, expected[name])


def test_what_is_written_into_memory_counts_as_passing() -> None:
    """It may be read by others."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(4, 4)
        rows[0] = (x @ p[0])[0]
        other = torch.zeros(4, 4)
        other.view(16).add_((x @ p[1]).view(16))
        return rows + other

    passing = [is_passing for name, is_passing in _passing(forward).items() if "zeros" not in name]
    assert len(passing) > 4
    assert all(passing)
