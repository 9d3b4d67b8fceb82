"""The callback for Lightning's Trainer: real `fit`s, with DDP on two ranks, on one, and without."""

from __future__ import annotations

import csv
import importlib
import json
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

pytest.importorskip("lightning", reason="pip install 'ddpopt[recipes]'")

from ddpopt.integrations import lightning as integration
from ddpopt.integrations.lightning import DDPOptCallback

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
EAGER = {"inner": "aot_eager"}
NUM_BATCHES = 8
LOG_EVERY = 2  # steps


def _trainer(package: str, folder: str, callbacks: list[Any], **more: Any) -> Any:
    pl = importlib.import_module(package)
    loggers = importlib.import_module(f"{package}.loggers")
    return pl.Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=LOG_EVERY,
        logger=loggers.CSVLogger(folder, version=0),
        **{"max_epochs": 1, **more},
    )


def _module(package: str, step: str = "automatic") -> Any:
    class Module(importlib.import_module(package).LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = MLP()
            if step == "network":
                self.model.compile(backend="ddpopt", options=EAGER)
            self.automatic_optimization = step != "manual"

        def training_step(self, batch: torch.Tensor) -> Any:
            if step == "raises":
                raise ArithmeticError
            loss = self.model(batch).square().mean()
            self.log("loss", loss)
            self.log_dict({"twice": 2 * loss})
            if step == "manual":
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def validation_step(self, batch: torch.Tensor) -> None:
            self.log("val", self.model(batch).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    return Module()


def _batches(rank: int) -> Any:
    generator = torch.Generator().manual_seed(rank)
    batches = torch.randn(NUM_BATCHES, 4, WIDTH, generator=generator)
    return torch.utils.data.DataLoader(batches, batch_size=None)


def _ddp(package: str) -> Any:
    return importlib.import_module(f"{package}.strategies").DDPStrategy(bucket_cap_mb=0.03)


@on_ranks(2)
@pytest.mark.parametrize(
    ("package", "step", "accumulate"),
    [
        ("lightning.pytorch", "automatic", 1),
        ("pytorch_lightning", "automatic", 2),
        ("lightning.pytorch", "manual", 1),
        ("lightning.pytorch", "network", 1),
    ],
)
def test_fit_and_resumed_fit_split_log_and_explain(
    rank: int, tmp_path: Path, package: str, step: str, accumulate: int
) -> None:
    """Epochs have validation; weights equal those of a twin without the callback."""
    common = {"devices": 2, "accumulate_grad_batches": accumulate, "use_distributed_sampler": False}
    callback = DDPOptCallback(EAGER, explanation=tmp_path / "explanation.json")
    all_rows: list[dict[str, str]] = []
    data, checkpoint = _batches(rank), None
    with as_torchrun(rank):
        for num_epochs in (1, 2):
            module = _module(package, step)
            options = {**common, "strategy": _ddp(package), "max_epochs": num_epochs}
            trainer = _trainer(package, f"{tmp_path}/{num_epochs}", [callback], **options)
            trainer.fit(module, data, data, ckpt_path=checkpoint)
            assert not {"log", "log_dict", "training_step"} & vars(module).keys()
            checkpoint = f"{tmp_path}/checkpoint"
            trainer.save_checkpoint(checkpoint)
            if rank == 1:
                assert callback.explanation is None
                continue
            assert "3 backward sections for 4 DDP buckets" in str(callback.explanation)
            with Path(trainer.logger.log_dir, "metrics.csv").open() as file:
                all_rows += csv.DictReader(file)
        twin = _module(package, step)
        options = {**common, "strategy": _ddp(package), "max_epochs": 2}
        _trainer(package, f"{tmp_path}/twin", [], **options).fit(twin, data, data)
    torch.testing.assert_close(list(module.parameters()), list(twin.parameters()))
    if rank == 1:
        return
    assert json.loads((tmp_path / "explanation.json").read_text())["model"] == "Module"
    rows = [row for row in all_rows if row["ddpopt.sections"]]
    assert [row["step"] for row in rows] == [row["step"] for row in all_rows if row["loss"]]
    assert len(rows) == 2 * NUM_BATCHES // accumulate // LOG_EVERY
    assert float(rows[-1]["ddpopt.sections"]) == 3
    assert float(rows[-1]["ddpopt.step.ms"]) > 0


def test_an_error_before_fit_finds_nothing_to_restore() -> None:
    """Validation alone, for example, may raise one."""
    module = _module(PACKAGES[0])
    DDPOptCallback(EAGER).on_exception(None, module, ValueError())
    assert "training_step" not in vars(module)


def test_without_ddp_the_model_is_compiled_whole_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning's default strategy for one device uses no DDP."""
    caplog.set_level("INFO", logger="ddpopt")
    callback = DDPOptCallback(EAGER)
    trainer = _trainer(PACKAGES[0], str(tmp_path), [callback], devices=1)
    trainer.fit(_module(PACKAGES[0]), _batches(0))
    assert "SingleDeviceStrategy trains on one rank" in caplog.text
    assert "compiled whole, because no DistributedDataParallel forward is active" in caplog.text
    assert callback.explanation is None


@pytest.mark.parametrize("world_size", [1, 2])
def test_another_strategy_is_an_error_that_names_it(world_size: int) -> None:
    """With one rank the strategy has wrapped the module otherwise, with two it shards in place."""

    class ShardingStrategy: ...

    module = nn.Linear(2, 2)
    trainer = SimpleNamespace(
        global_step=0,
        model=nn.Sequential(module) if world_size == 1 else module,
        strategy=ShardingStrategy(),
        world_size=world_size,
    )
    with pytest.raises(UnsupportedModeError, match=r"ShardingStrategy.*strategy='ddp'.*leave"):
        DDPOptCallback(EAGER).on_fit_start(trainer, module)


def test_a_bad_option_is_an_error_before_training() -> None:
    with pytest.raises(OptionError, match="did you mean 'buckets'"):
        DDPOptCallback({"bucket": "auto"})
    with pytest.raises(OptionError, match="takes one of the two"):
        DDPOptCallback({"buckets": "auto"}, mode="max-autotune")


def test_a_training_that_fails_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    module = _module(PACKAGES[0], "raises")
    trainer = _trainer(PACKAGES[0], str(tmp_path), [DDPOptCallback(EAGER)], devices=1)
    with pytest.raises(ArithmeticError):
        trainer.fit(module, _batches(0))
    assert not {"log", "log_dict", "training_step"} & vars(module).keys()


def test_a_module_that_is_compiled_already_is_not_compiled_again() -> None:
    module = _module(PACKAGES[0])
    module.model = torch.compile(module.model, backend="ddpopt", options=EAGER)
    trainer = SimpleNamespace(global_step=0, model=module, strategy=None, world_size=1)
    DDPOptCallback(EAGER).on_fit_start(trainer, module)
    assert "training_step" not in vars(module)


def test_the_callback_is_one_of_the_package_that_the_program_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Trainer takes those of its own package alone; with both or none imported it is of both."""
    both = tuple(importlib.import_module(package).Callback for package in PACKAGES)
    assert integration._callback_classes() == both
    monkeypatch.delitem(integration.sys.modules, PACKAGES[0])
    assert integration._callback_classes() == both[1:]
    monkeypatch.setattr(integration.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="pip install lightning"):
        integration._callback_classes()
