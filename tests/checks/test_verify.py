"""`verify` finds broken compiled code and nothing else. In test_promises.py it changes nothing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.checks import verify as verifying
from ddpopt.checks.verify import verify
from ddpopt.errors import DDPOptError, OptionError
from tests.support.beside import compiled
from tests.support.cuts import compiling_nothing, only_cut
from tests.support.models import MLP, assert_equal_states, batches, state_of
from tests.support.on_ranks import gather, on_ranks
from tests.support.wrong_compiler import scale_a_gradient

CAPS = {"bucket_cap_mb": 0.03}


class Noisy(nn.Module):
    """A model with dropout, batch statistics, a counter in Python, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm, self.dropout = nn.BatchNorm1d(64), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        x = self.dropout(self.norm(self.first(x)).relu())
        return {"logits": self.second(x) * scale, "hidden": x}


def _compiled(module: nn.Module, **options: Any) -> Any:
    return compiled(DistributedDataParallel(module, **CAPS), **options)


def _loss_of(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return output["logits"].square().mean()


@on_ranks(2)
@pytest.mark.quick("forward-0")
@pytest.mark.parametrize(
    ("split", "steps_before"), [("forward", 0), ("backward", 1), ("forward", 3)]
)
def test_verify_passes_right_code_before_and_after_buckets_are_rebuilt(
    rank: int, split: str, steps_before: int
) -> None:
    """All ranks have one verdict, before the first step, before buckets are rebuilt, and later."""
    ddp = DistributedDataParallel(Noisy(), **CAPS)
    model, (x,) = compiled(ddp, split=split), batches(rank, [(16, 64)])
    for _ in range(steps_before):
        _loss_of(model(x)).backward()
    result = verify(model, {"x": x, "scale": 2.0}, _loss_of)
    assert result.passed, str(result)
    assert result.gradients.keys() == {name for name, _ in ddp.module.named_parameters()}
    assert result.buffers.keys() == {name for name, _ in ddp.module.named_buffers()}
    assert result.num_ranks == 2
    assert len(set(gather(str(result)))) == 1
    _loss_of(model(x)).backward()  # training goes on


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
@pytest.mark.parametrize("inner", [scale_a_gradient, _rounding])
def test_verify_fails_wrong_code_and_names_the_worst_gradient(one_rank: None, inner: Any) -> None:
    """One percent in one gradient, or 16 bits in place of 32, is above the tolerance."""
    result = verify(_compiled(MLP(), inner=inner, split="forward"), torch.randn(8, 64))
    assert not result.passed
    assert result.worst_error > result.tolerance
    assert "verification FAILED" in str(result)
    assert result.worst in str(result)
    if inner is scale_a_gradient:
        assert re.fullmatch(r"gradient of layers\.\d\.(weight|bias)", result.worst)
        assert result.loss <= result.tolerance


def test_verify_fails_a_buffer_that_is_not_written(one_rank: None) -> None:
    result = verify(_compiled(Noisy(), inner=_forgetting, split="forward"), torch.randn(8, 64))
    assert result.buffers["norm.running_mean"] > result.tolerance


@on_ranks(2)
def test_verify_fails_on_all_ranks_what_one_compiled_wrong(rank: int) -> None:
    """Gradients are averaged, so the error shows on all ranks; the verdict is one."""
    broken = mock.patch.object(_torch, "aot_eager", _broken_backward)
    with broken if rank == 1 else contextlib.nullcontext():
        result = verify(_compiled(MLP(), split="backward"), *batches(rank, [(8, 64)]))
    assert not result.passed
    assert len(set(gather((result.worst_rank, str(result))))) == 1


# ---- What can be verified ---------------------------------------------------------------------


def test_a_compiled_module_in_ddp_is_verified_too(one_rank: None) -> None:
    """In this order of wrapping too, Dynamo's code is shared: training compiles nothing anew."""
    ddp, x = DistributedDataParallel(compiled(MLP()), **CAPS), torch.randn(8, 64)
    assert verify(ddp, x).passed
    with compiling_nothing():
        ddp(x).sum().backward()


@pytest.mark.quick("forward")
@pytest.mark.parametrize("split", ["forward", "backward"])
def test_training_runs_the_code_that_was_verified(one_rank: None, split: str) -> None:
    """The first step after it compiles nothing, and plans are known as without it."""
    model, x = _compiled(MLP(), split=split), torch.randn(8, 64)
    assert verify(model, x).passed
    with compiling_nothing():
        for _ in range(3):
            model(x).sum().backward()
    assert len(only_cut(model).sections) > 1
    assert only_cut(model).split == split


@pytest.mark.slow
def test_inductors_random_numbers_are_eagers_while_it_is_verified(one_rank: None) -> None:
    """Dropout under Inductor draws others; the copy is compiled apart, and the result says so."""
    ddp, x = DistributedDataParallel(Noisy(), **CAPS), torch.randn(16, 64)
    before, rng = state_of(ddp), torch.get_rng_state()
    result = verify(compiled(ddp, inner="inductor", split="backward"), x)
    assert result.passed, str(result)
    assert "random numbers" in str(result)
    assert_equal_states(state_of(ddp), before, bitwise=True)
    assert torch.equal(rng, torch.get_rng_state())


@torch.compile(backend="ddpopt", options={"inner": "aot_eager"})
def _drop_some(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x)


class _Dropping(MLP):
    """Has what draws random numbers compiled, which is no module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _drop_some(super().forward(x))


def _with_a_foreign_forward() -> nn.Module:
    model = MLP()
    model.forward = lambda x: MLP.forward(model, x)  # type: ignore[method-assign]
    return _compiled(model)


def _mixed() -> nn.Module:
    model = _compiled(MLP())
    model.mixed_precision = object()
    return model


@pytest.mark.parametrize(
    ("make", "loss_fn", "error", "named"),
    [
        (MLP, None, TypeError, "MLP"),
        (lambda: DistributedDataParallel(MLP()), None, OptionError, "nothing in this model"),
        (
            lambda: torch.compile(DistributedDataParallel(MLP()), backend="aot_eager"),
            None,
            OptionError,
            "nothing in this model",
        ),
        (lambda: _compiled(MLP()), lambda output: output, OptionError, r"\(8, 64\)"),
        (_with_a_foreign_forward, None, OptionError, "would run the original"),
        (_mixed, None, OptionError, "mixed_precision"),
        (lambda: DistributedDataParallel(_Dropping()), None, OptionError, "draws random numbers"),
    ],
    ids=[
        "no DDP",
        "uncompiled",
        "another backend",
        "a loss that is no scalar",
        "a forward set on the model",
        "a mode",
        "a function that draws",
    ],
)
def test_verify_refuses_what_it_cannot_compare(
    one_rank: None, make: Any, loss_fn: Any, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        verify(make(), torch.randn(8, 64), loss_fn)


@pytest.mark.parametrize("late", [False, True])
def test_an_error_in_a_step_or_in_the_verdict_is_raised(one_rank: None, late: bool) -> None:
    """A step of the model may raise behind the first, which is a rehearsal."""
    losses: list[torch.Tensor] = []

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        losses.append(output.sum())
        if not late and len(losses) > 2:
            raise KeyError("no target")
        return losses[-1]

    model, x = _compiled(MLP()), torch.randn(8, 64)
    failing = mock.patch.object(verifying, "_judge_reports", side_effect=KeyError("no target"))
    expected = DDPOptError if late else KeyError
    with failing if late else contextlib.nullcontext(), pytest.raises(expected, match="no target"):
        verify(model, x, loss_fn)


def test_a_tolerance_can_be_given_for_a_dtype(one_rank: None) -> None:
    """The tolerances of other dtypes stay as they are."""
    model = _compiled(MLP(), inner=scale_a_gradient, split="forward")
    assert verify(model, torch.randn(8, 64), tolerances={torch.float32: 0.1}).passed
    assert not verify(model, torch.randn(8, 64), tolerances={torch.bfloat16: 0.1}).passed
