"""Run it with: torchrun --standalone --nproc-per-node 2 examples/recipes/lightning_trainer.py

Lightning's Trainer (`pip install lightning`) with ddpopt's callback, on CPUs with gloo, with
validation and gradient accumulation. An eager twin is trained beside it, and both must end with the
same parameters.
"""

import argparse
import copy
import gc
import os
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from ddpopt.integrations.lightning import DDPOptCallback

NUM_BATCHES = 8


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x

    def training_step(self, batch):
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        self.log("val_loss", self(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


# --8<-- [start:recipe]
def train(module: LightningModule, data: DataLoader, folder: str, options: dict | None) -> Trainer:
    callbacks = []
    if options is not None:
        callbacks = [DDPOptCallback(options, explanation=f"{folder}/explanation.html")]
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        # And lazy_bucket_allocation=True from torch 2.15 on: see docs/recipes.md.
        strategy=DDPStrategy(bucket_cap_mb=0.03, gradient_as_bucket_view=True),
        callbacks=callbacks,
        logger=CSVLogger(folder),  # or TensorBoardLogger, WandbLogger, ...
        log_every_n_steps=2,
        accumulate_grad_batches=2,
        max_epochs=2,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, data, data)
    return trainer


# --8<-- [end:recipe]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inner", default="inductor", help="what compiles the sections")
    args = parser.parse_args()
    torch.manual_seed(0)
    module = Net()
    twin = copy.deepcopy(module)
    data = DataLoader(
        torch.randn(16 * NUM_BATCHES, 64), batch_size=8
    )  # Lightning gives ranks parts
    with tempfile.TemporaryDirectory() as folder:
        trainer = train(module, data, folder, {"inner": args.inner})
        if trainer.is_global_zero:
            text = Path(trainer.logger.log_dir, "metrics.csv").read_text()
            print("logged:", text.splitlines()[0])
        train(twin, data, folder, None)
    for ours, expected in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    trainer.print("parameters equal the twin's")


if __name__ == "__main__":
    main()
    gc.collect()  # DDP has to go before its group, which Lightning destroys: see docs/faq.md
