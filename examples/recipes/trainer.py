"""Run it with: torchrun --standalone --nproc-per-node 2 examples/recipes/trainer.py

A GPT-2 of two layers with Hugging Face's Trainer (`pip install transformers accelerate`) and
ddpopt's callback, on CPUs with gloo. An eager twin is trained beside it, and both must end with the
same parameters, but for rounding.
"""

import argparse
import copy
import gc
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ddpopt.integrations.transformers import DDPOptCallback

NUM_STEPS = 6


# --8<-- [start:recipe]
def train(model: nn.Module, dataset: list[dict], folder: str, options: dict | None) -> Trainer:
    callbacks = []
    if options is not None:
        callbacks = [DDPOptCallback(options, explanation=f"{folder}/explanation.html")]
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=2,
        ddp_bucket_cap_mb=1,
        ddp_find_unused_parameters=False,
        learning_rate=1e-3,
        logging_steps=2,
        report_to="none",  # reporting callbacks come after ours: [..., TensorBoardCallback()]
        save_strategy="no",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset, callbacks=callbacks)
    trainer.train()
    return trainer


# --8<-- [end:recipe]


def make_model() -> nn.Module:
    config = GPT2Config(
        vocab_size=256, n_positions=32, n_embd=128, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def make_dataset() -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(256, (4 * NUM_STEPS, 32), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inner", default="inductor", help="what compiles the sections")
    args = parser.parse_args()
    model, dataset = make_model(), make_dataset()
    twin, start = copy.deepcopy(model), copy.deepcopy(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = train(model, dataset, folder, {"inner": args.inner})
        train(twin, dataset, folder, None)
    # AdamW's step is as long for a gradient that is all rounding, so single weights may differ.
    ours, expected, start = (parameters_to_vector(m.parameters()) for m in (model, twin, start))
    assert (ours - expected).norm() < 1e-2 * (expected - start).norm(), "the twins have diverged"
    if trainer.is_world_process_zero():
        print("logged:", *trainer.state.log_history[-2])
        print("parameters equal the twin's, but for rounding")


if __name__ == "__main__":
    main()
    gc.collect()  # DDP has to go before its group: see docs/faq.md
    dist.destroy_process_group()
