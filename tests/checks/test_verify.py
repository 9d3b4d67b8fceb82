"""`verify` finds broken compiled code and nothing else, and leaves everything as it was."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import _torch
from ddpopt.checks.verify import verify
from ddpopt.split import state
from tests.support.models import MLP, batches, state_of, twins
from tests.support.ranks import Ranks
from tests.support.wrong_compiler import scale_a_gradient

SPLITS = ["forward", "backward"]
CAP_MB = 0.03


class Noisy(nn.Module):
    """A model with dropout, batch statistics, a counter in Python, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm, self.dropout = nn.BatchNorm1d(64), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        x = self.dropout(self.norm(self.first(x)).relu())
        return {"logits": self.second(x) * scale, "hidden": x}


def _snapshot(ddp: DistributedDataParallel) -> dict[str, Any]:
    """Return all that a rehearsal must not change."""
    return {
        "state": state_of(ddp),
        "rng": torch.get_rng_state(),
        "rebuilt": ddp._has_rebuilt_buckets,
        "iterations": ddp._get_ddp_logging_data().get("iteration"),
        "flags": (ddp.require_backward_grad_sync, ddp.require_forward_param_sync, ddp.training),
        "hooks": len(ddp.module._forward_hooks),
        "ids": [id(p) for p in ddp.parameters()] + [id(p.grad) for p in ddp.parameters()],
    }


def _assert_untouched(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before["state"].items():
        assert torch.equal(value, after["state"][name]), name
    assert torch.equal(before["rng"], after["rng"])
    for key in before.keys() - {"state", "rng"}:
        assert before[key] == after[key], key


def _compiled(module: nn.Module, split: str, inner: Any = "aot_eager", **ddp_options: Any) -> Any:
    ddp = DistributedDataParallel(module, **{"bucket_cap_mb": CAP_MB, **ddp_options})
    return torch.compile(ddp, backend="ddpopt", options={"inner": inner, "split": split})


def _verify(rank: int, split: str, steps_before: int, ddp_options: dict[str, Any]) -> str:
    """Verify after some steps; return the verdict."""
    model = _compiled(Noisy(), split, **ddp_options)
    ddp = state.ddp_of(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    (x,) = batches(rank, [(16, 64)])
    for _ in range(steps_before):
        model(x)["logits"].square().mean().backward()
        optimizer.step()
    before, steps = _snapshot(ddp), copy.deepcopy(optimizer.state_dict())
    result = verify(model, {"x": x, "scale": 2.0}, lambda out: out["logits"].square().mean())
    _assert_untouched(before, _snapshot(ddp))
    assert str(steps) == str(optimizer.state_dict())
    assert result.passed, str(result)
    assert result.gradients.keys() == {name for name, _ in ddp.module.named_parameters()}
    assert result.buffers.keys() == {name for name, _ in ddp.module.named_buffers()}
    assert result.num_ranks == 2
    model(x)["logits"].square().mean().backward()  # training goes on
    return str(result)


@pytest.mark.quick("0-forward")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_right_code_passes_and_nothing_changes(ranks: Ranks, split: str, steps_before: int) -> None:
    """It is verified before the first step, before DDP rebuilds its buckets, and after that.

    Both ranks get the same verdict.
    """
    first, second = ranks.run(_verify, split, steps_before, {})
    assert first == second
    assert "verification passed" in first
    assert "on 2 ranks" in first


@pytest.mark.quick("static_graph-forward")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "ddp_options",
    [
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_ddps_options_are_those_of_the_copy(
    ranks: Ranks, split: str, ddp_options: dict[str, Any]
) -> None:
    """A mode in which the Reducer works otherwise is that of the copy's Reducer."""
    first, second = ranks.run(_verify, split, 2, ddp_options)
    assert first == second


# ---- What is wrong is found -------------------------------------------------------------------


def _rounding(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Compile so that what a section returns is rounded to 16 bits."""
    compiled = _torch.lookup_backend("aot_eager")(gm, inputs)
    return lambda *args: tuple(value.bfloat16().float() for value in compiled(*args))


def _forgetting(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Compile so that buffers, which a section writes to, stay as they are."""
    compiled = _torch.lookup_backend("aot_eager")(gm, inputs)

    def run(*args: Any) -> Any:
        values = [
            value.clone() if isinstance(value, torch.Tensor) and not value.requires_grad else value
            for value in args
        ]
        return compiled(*values)

    return run


def _broken_backward(gm: fx.GraphModule, inputs: list[Any], cutting: Any) -> Callable[..., Any]:
    """Compile as `_torch.aot_eager`, but so that a gradient of each section is too large."""
    compile_well = cutting.compile_backward

    def compile_all(graph: fx.GraphModule, values: list[Any], compile_section: Any) -> Any:
        def compile_badly(section: fx.GraphModule, inputs: list[Any], origins: Any) -> Any:
            compiled = compile_section(section, inputs, origins)

            def run(args: list[Any]) -> list[Any]:
                outputs = list(compiled(args))
                outputs[-1] = outputs[-1] * 1.01
                return outputs

            return _torch.boxed(run)

        return compile_well(graph, values, compile_badly)

    cutting.compile_backward = compile_all
    return _AOT_EAGER(gm, inputs, cutting)


_AOT_EAGER = _torch.aot_eager


@pytest.mark.quick("scale_a_gradient")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("inner", [scale_a_gradient, _rounding])
def test_a_compiler_that_is_wrong_fails_and_the_worst_is_named(inner: Any) -> None:
    """One percent in one gradient, or 16 bits in place of 32, is above the tolerance."""
    result = verify(_compiled(MLP(), "forward", inner), torch.randn(8, 64))
    assert not result.passed
    assert result.worst_error > result.tolerance
    assert "verification FAILED" in str(result)
    assert result.worst in str(result)
    if inner is scale_a_gradient:
        assert re.fullmatch(r"gradient of layers\.\d\.(weight|bias)", result.worst)
        assert result.loss <= result.tolerance


@pytest.mark.usefixtures("one_rank")
def test_a_buffer_that_is_not_written_fails() -> None:
    result = verify(
        _compiled(nn.ModuleList([Noisy()])[0], "forward", _forgetting), torch.randn(8, 64)
    )
    assert result.buffers["norm.running_mean"] > result.tolerance


def _verify_broken(rank: int, broken_rank: int) -> tuple[bool, int, str]:
    torch.manual_seed(0)
    with mock.patch.object(
        _torch, "aot_eager", _broken_backward if rank == broken_rank else _AOT_EAGER
    ):
        model = _compiled(MLP(), "backward")
        result = verify(model, *batches(rank, [(8, 64)]))
        assert len(state.ddp_of(model).module.layers) == 6
    return result.passed, result.worst_rank, str(result)


def test_a_backward_that_one_rank_compiled_wrong_fails_on_all(ranks: Ranks) -> None:
    """Gradients are averaged, so the error shows on all ranks; the verdict is one."""
    first, second = ranks.run(_verify_broken, 1)
    assert first == second
    assert not first[0]


# ---- What can be verified ---------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
def test_a_compiled_module_in_ddp_is_verified_too() -> None:
    """In this order of wrapping too, Dynamo's code is shared: training compiles nothing anew."""
    compiled = torch.compile(MLP(), backend="ddpopt", options={"inner": "aot_eager"})
    ddp = DistributedDataParallel(compiled, bucket_cap_mb=CAP_MB)
    before = counters["stats"]["unique_graphs"]
    assert verify(ddp, torch.randn(8, 64)).passed
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs > before
    ddp(torch.randn(8, 64)).sum().backward()
    assert counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.quick("forward")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("split", SPLITS)
def test_training_runs_the_code_that_was_verified(split: str) -> None:
    """The first step after it compiles nothing, and plans are known as without it."""
    model = _compiled(MLP(), split)
    x = torch.randn(8, 64)
    assert verify(model, x).passed
    num_graphs = counters["stats"]["unique_graphs"]
    for _ in range(3):
        model(x).sum().backward()
    assert counters["stats"]["unique_graphs"] == num_graphs
    (plan,) = state.get(state.ddp_of(model)).cuts
    assert len(plan.sections) > 1
    assert plan.split == split


@pytest.mark.usefixtures("one_rank")
def test_inductors_random_numbers_are_eagers_in_it() -> None:
    """Dropout under Inductor draws others; the copy is compiled apart, and the result says so."""
    model = _compiled(Noisy(), "backward", "inductor")
    x = torch.randn(16, 64)
    before = _snapshot(state.ddp_of(model))
    result = verify(model, x)
    _assert_untouched(before, _snapshot(state.ddp_of(model)))
    assert result.passed, str(result)
    assert "random numbers" in str(result)


@pytest.mark.usefixtures("one_rank")
def test_what_cannot_be_verified_is_refused() -> None:
    """These are a model that we do not compile, and a loss that is no scalar."""
    ddp, other = twins(MLP())
    with pytest.raises(TypeError, match="takes a DistributedDataParallel"):
        verify(MLP(), torch.randn(8, 64))
    with pytest.raises(ddpopt.errors.OptionError, match="nothing in this model is compiled"):
        verify(ddp, torch.randn(8, 64))
    with pytest.raises(ddpopt.errors.OptionError, match="nothing in this model is compiled"):
        verify(torch.compile(other, backend="aot_eager"), torch.randn(8, 64))
    with pytest.raises(ddpopt.errors.OptionError, match=r"the loss is a tensor of shape \(8, 64\)"):
        verify(_compiled(MLP(), "forward"), torch.randn(8, 64), lambda output: output)


@pytest.mark.usefixtures("one_rank")
def test_a_tolerance_can_be_given_for_a_dtype() -> None:
    """Those of other dtypes stay as they are."""
    model = _compiled(MLP(), "forward", scale_a_gradient)
    assert verify(model, torch.randn(8, 64), tolerances={torch.float32: 0.1}).passed
    assert not verify(model, torch.randn(8, 64), tolerances={torch.bfloat16: 0.1}).passed
