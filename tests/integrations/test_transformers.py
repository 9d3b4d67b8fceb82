"""The callback for Hugging Face's Trainer: real trainings, with DDP on two ranks and on one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpopt.errors import OptionError, UnsupportedModeError
from tests.integrations.torchrun import as_torchrun
from tests.support.models import MLP, WIDTH
from tests.support.on_ranks import on_ranks

transformers = pytest.importorskip("transformers", reason="pip install 'ddpopt[recipes]'")
pytest.importorskip("accelerate", reason="pip install 'ddpopt[recipes]'")

from accelerate.state import AcceleratorState  # noqa: E402  # what it needs may not be there

from ddpopt.integrations import transformers as integration  # noqa: E402
from ddpopt.integrations.transformers import DDPOptCallback  # noqa: E402

EAGER = {"inner": "aot_eager"}
NUM_STEPS, LOG_EVERY = 8, 2


class Model(nn.Module):
    """A model that takes and returns what the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = MLP()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.mlp(x) - labels).square().mean()}


class Later(transformers.TrainerCallback):
    """A callback that reports, further back in the list."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **_: Any) -> None:
        self.rows.append({**logs, "step": state.global_step})


@contextlib.contextmanager
def _fresh_accelerate(rank: int | None) -> Iterator[None]:
    """Have Accelerate look at its environment anew, and see a rank of two, or none."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with contextlib.nullcontext() if rank is None else as_torchrun(rank):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def _train(folder: str, callbacks: list[Any], resume: str | None = None, **more: Any) -> Any:
    common: dict[str, Any] = {
        "ddp_bucket_cap_mb": 0.03,
        "ddp_find_unused_parameters": False,
        "disable_tqdm": True,
        "eval_steps": 4,
        "eval_strategy": "steps",
        "logging_steps": LOG_EVERY,
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "save_steps": NUM_STEPS // 2,
        "use_cpu": True,
    }
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(16, WIDTH, generator=generator)
    trainer = transformers.Trainer(
        model=Model(),
        args=transformers.TrainingArguments(output_dir=folder, **common | more),
        train_dataset=[{"x": row, "labels": row} for row in rows],
        eval_dataset=[{"x": row, "labels": row} for row in rows],
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@on_ranks(2)
@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": 2, "bf16": True}])
def test_training_and_resumed_training_split_log_and_explain(
    rank: int, tmp_path: Path, more: dict[str, Any]
) -> None:
    """Training has evaluations; weights equal those of a twin without the callback."""
    with _fresh_accelerate(rank):
        for resume in (None, f"{tmp_path}/with/checkpoint-{NUM_STEPS // 2}"):
            callback, later = DDPOptCallback(EAGER, explanation=tmp_path / "e.html"), Later()
            trainer = _train(f"{tmp_path}/with", [callback, later], resume, **more)
            if rank == 1:
                assert callback.explanation is None
            else:
                text = str(callback.explanation)
                assert re.search(r": [34] backward sections for 4 DDP buckets", text)
        twin = _train(f"{tmp_path}/twin", [], **more)
    pairs = zip(trainer.model.parameters(), twin.model.parameters(), strict=True)
    for parameter, expected in pairs:
        torch.testing.assert_close(parameter, expected, rtol=1e-3, atol=1e-5)
    if rank == 1:
        assert later.rows
        assert all("ddpopt.sections" not in row for row in later.rows)
        return
    assert "<html" in (tmp_path / "e.html").read_text()
    for rows in (later.rows, trainer.state.log_history):
        trained = [row for row in rows if "loss" in row and row["step"] > NUM_STEPS // 2]
        assert [row["step"] for row in trained] == [6, 8]
        assert all(row["ddpopt.sections"] >= 3 for row in trained)
        assert trained[-1]["ddpopt.step.ms"] > 0


def test_what_is_logged_before_any_training_is_left_alone() -> None:
    """`evaluate` alone, for example, logs."""
    logs = {"loss": 1.0}
    DDPOptCallback(EAGER).on_log(None, None, None, logs=logs)
    assert logs == {"loss": 1.0}


def test_one_rank_is_compiled_whole_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="ddpopt")
    with _fresh_accelerate(None):
        callback = DDPOptCallback(EAGER)
        _train(str(tmp_path), [callback])
    assert "the Trainer trains on one rank, without DistributedDataParallel" in caplog.text
    assert "compiled whole, because no DistributedDataParallel forward is active" in caplog.text
    assert callback.explanation is None


def _begin(monkeypatch: pytest.MonkeyPatch, kind: str, **arguments: Any) -> None:
    state = SimpleNamespace(distributed_type=SimpleNamespace(value=kind))
    monkeypatch.setattr(integration, "AcceleratorState", lambda: state)
    arguments = {"torch_compile": False, "torch_compile_backend": None, "n_gpu": 0} | arguments
    DDPOptCallback(EAGER).on_train_begin(SimpleNamespace(**arguments), None, None, model=MLP())


@pytest.mark.parametrize(
    ("kind", "n_gpu", "named"), [("FSDP", 1, "FSDP"), ("NO", 2, "DataParallel")]
)
def test_another_strategy_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, kind: str, n_gpu: int, named: str
) -> None:
    with pytest.raises(UnsupportedModeError, match=rf"with {named}, .*torchrun.*leave"):
        _begin(monkeypatch, kind, n_gpu=n_gpu)


def test_a_trainer_that_compiles_by_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"torch_compile": True, "torch_compile_backend": "inductor"}
    with pytest.raises(UnsupportedModeError, match="'inductor' itself; leave torch_compile out"):
        _begin(monkeypatch, "MULTI_GPU", **arguments)


def test_a_bad_option_is_an_error_before_training() -> None:
    with pytest.raises(OptionError, match="did you mean 'buckets'"):
        DDPOptCallback({"bucket": "auto"})
    with pytest.raises(OptionError, match="takes one of the two"):
        DDPOptCallback({"buckets": "auto"}, mode="max-autotune")
