"""The models that are measured; `python -m benchmarks.harness.models` prints their sizes.

Those from the transformers package (`pip install ddpopt[benchmarks]`) have random weights. All but
those "as published" are scaled so that a step takes about half a second on one core. None drops
anything out, so that all peers compute the same loss.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.communicating import ExpertLayer, ParallelLayer, SyncedConvLayer


class MissingPackageError(ImportError):
    """A model's package is not installed."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and what one step feeds it.

    `batch()` returns the keyword arguments of its forward, which returns the loss, or something
    with an attribute `loss`.
    """

    name: str
    description: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]

    def loss(self, output: Any) -> Tensor:
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        return loss

    def num_parameters(self) -> int:
        """Count the parameters, without memory for them."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())


def find_model(name: str) -> Model:
    """Return a model by its name here, or as `package.module:attribute`, a `Model` of yours.

    Raises:
        KeyError: there is none of that name.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        model: Model = getattr(importlib.import_module(module), attribute)
        return model
    if name not in MODELS:
        raise KeyError(f"there is no model {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name]


# ---- our own ----------------------------------------------------------------------------------


class Chain(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(x, targets)


class ConvLayer(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(num_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolution(x)))


class FusedLayer(nn.Module):
    """A product, then 26 pointwise operations, which a compiler makes one loop of.

    Their parameters are as large as a sequence, so that buckets end between them.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scales = nn.ParameterList(torch.ones(length, width) for _ in range(5))
        self.shifts = nn.ParameterList(torch.zeros(length, width) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        for scale, shift in zip(self.scales, self.shifts, strict=True):
            y = torch.sin(y * scale + shift) + 0.5 * y
        return x + y


def load_example() -> Any:
    """Return examples/train_gpt.py as a module."""
    return importlib.import_module("train_gpt")


def _gpt(layers: int, width: int, heads: int, context: int, words: int = 256) -> nn.Module:
    gpt: Any = load_example().GPT(layers, width, heads, context)
    if words != 256:
        gpt.byte, gpt.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
    model: nn.Module = gpt
    return model


def _gpt_batch(num_sequences: int, context: int, words: int = 256) -> dict[str, Tensor]:
    text = torch.randint(words, (num_sequences, context + 1))
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def _convnet(layer: Callable[..., nn.Module] = ConvLayer) -> nn.Module:
    widths = [3, 32, 64, 64, 128, 128, 256, 256, 512, 512, 512, 512]
    pairs = itertools.pairwise(widths)
    layers = [layer(a, b, stride=2 if b > a else 1) for a, b in pairs]
    return Chain(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100))


def _fused(num_layers: int, length: int, width: int) -> nn.Module:
    layers = [FusedLayer(length, width) for _ in range(num_layers)]
    return Chain(*layers, nn.Flatten(0, 1), nn.Linear(width, 100))


def _fused_batch(num_sequences: int, length: int, width: int) -> dict[str, Tensor]:
    targets = torch.randint(100, (num_sequences * length,))
    return {"x": torch.randn(num_sequences, length, width), "targets": targets}


def _rows(layer: Callable[[int], nn.Module], num_layers: int, width: int) -> nn.Module:
    """Return layers for sequences of rows, and a class for each row."""
    layers = [layer(width) for _ in range(num_layers)]
    return Chain(*layers, nn.Flatten(0, 1), nn.Linear(width, 100))


def _experts(num_layers: int, width: int) -> nn.Module:
    """Return layers with experts, whose parameters are each rank's own: DDP leaves them alone."""
    model = _rows(ExpertLayer, num_layers, width)
    own = [name for name, _ in model.named_parameters() if ".expert." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    return model


def _classify(*shape: int, num_classes: int = 100) -> dict[str, Tensor]:
    return {"x": torch.randn(shape), "targets": torch.randint(num_classes, shape[:1])}


# ---- those of the transformers package --------------------------------------------------------


def _transformer(architecture: str, sizes: Mapping[str, Any]) -> nn.Module:
    """Return a model with random weights.

    Raises:
        MissingPackageError: the package is not installed.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingPackageError(
            f"{architecture} is of the transformers package: "
            "pip install 'ddpopt[benchmarks]', or pip install transformers"
        ) from error
    model: Any = getattr(transformers, architecture)
    made: nn.Module = model(model.config_class(**sizes))
    return made.train()


def _tokens(num_sequences: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    tokens = torch.randint(vocabulary, (num_sequences, length))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _images(num_images: int, size: int, num_classes: int) -> dict[str, Tensor]:
    labels = torch.randint(num_classes, (num_images,))
    return {"pixel_values": torch.randn(num_images, 3, size, size), "labels": labels}


# ---- the table --------------------------------------------------------------------------------

_partial = functools.partial


def _gpt_model(name: str, description: str, sizes: tuple[int, ...], num_sequences: int) -> Model:
    """Return the example's GPT: `sizes` are layers, width, heads, context, and words if not 256."""
    batch = _partial(_gpt_batch, num_sequences, *sizes[3:])
    return Model(name, description, _partial(_gpt, *sizes), batch)


def _hugging_face(
    name: str, architecture: str, what: str, batch: Callable[[], dict[str, Tensor]], **sizes: Any
) -> Model:
    """Return a model of the transformers package, of this class and sizes."""
    build = _partial(_transformer, architecture, sizes)
    return Model(name, f"{architecture}{what}", build, batch)


_SMALL_GPT2: dict[str, Any] = {
    "vocab_size": 8192, "n_positions": 128, "n_embd": 384, "n_layer": 6, "n_head": 6,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_GPT2: dict[str, Any] = {
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False,
}  # fmt: skip
_NO_DROPOUT: dict[str, Any] = {
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_ALL = (
    _gpt_model(
        "gpt", "examples/train_gpt.py: 8 layers, width 384, 2 x 128 bytes", (8, 384, 6, 128), 2
    ),
    _gpt_model(
        "gpt70", "as gpt, with 4096 words and 2 x 256 of them: 70 MB", (8, 384, 6, 256, 4096), 2
    ),
    Model(
        "convnet", "11 x convolution, batch norm, ReLU; 16 images of 128 x 128",
        _convnet, _partial(_classify, 16, 3, 128, 128),
    ),
    Model(
        "fused", "14 x a product of width 512 and 26 pointwise operations; 4 x 128 rows",
        _partial(_fused, 14, 128, 512), _partial(_fused_batch, 4, 128, 512),
    ),
    Model(
        "experts", "8 x a dense layer of width 512, and an expert that rows are exchanged with",
        _partial(_experts, 8, 512), _partial(_fused_batch, 2, 128, 512),
    ),
    Model(
        "parallel", "6 x two tensor-parallel blocks of width 512; 2 x 64 rows",
        _partial(_rows, ParallelLayer, 6, 512), _partial(_fused_batch, 2, 64, 512),
    ),
    Model(
        "syncnorm", "as convnet, with batch norms that are synchronised",
        _partial(_convnet, SyncedConvLayer), _partial(_classify, 16, 3, 128, 128),
    ),
    _hugging_face(
        "bert", "BertForMaskedLM", ": 6 layers, width 384, 4 x 128 tokens of 8192",
        _partial(_tokens, 4, 128, 8192),
        vocab_size=8192, hidden_size=384, num_hidden_layers=6, num_attention_heads=6,
        intermediate_size=1536, max_position_embeddings=128, **_NO_DROPOUT,
    ),
    _hugging_face(
        "gpt2", "GPT2LMHeadModel", ": 6 layers, width 384, 4 x 128 tokens of 8192",
        _partial(_tokens, 4, 128, 8192), **_SMALL_GPT2, **_GPT2,
    ),
    _hugging_face(
        "t5", "T5ForConditionalGeneration", ": 4 + 4 layers, width 320, 4 x 96 tokens of 8192",
        _partial(_tokens, 4, 96, 8192),
        vocab_size=8192, d_model=320, d_kv=64, d_ff=1280, num_layers=4, num_heads=5,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    ),
    _hugging_face(
        "resnet50", "ResNetForImageClassification",
        ": 3/4 as wide as ResNet-50, 4 images of 96 x 96", _partial(_images, 4, 96, 100),
        hidden_sizes=[192, 384, 768, 1536], num_labels=100,
    ),
    _hugging_face(
        "vit", "ViTForImageClassification", ": 8 layers, width 384, 12 images of 96 x 96",
        _partial(_images, 12, 96, 100),
        hidden_size=384, num_hidden_layers=8, num_attention_heads=6, intermediate_size=1536,
        image_size=96, patch_size=16, num_labels=100, **_NO_DROPOUT,
    ),
    # As they were published; a step of one of these takes a GPU.
    _hugging_face(
        "gpt2-small", "GPT2LMHeadModel", " as published, 4 x 1024 tokens",
        _partial(_tokens, 4, 1024, 50257), n_embd=768, n_layer=12, n_head=12, **_GPT2,
    ),
    _hugging_face(
        "gpt2-medium", "GPT2LMHeadModel", " as published, medium, 2 x 1024 tokens",
        _partial(_tokens, 2, 1024, 50257), n_embd=1024, n_layer=24, n_head=16, **_GPT2,
    ),
    _hugging_face(
        "bert-base", "BertForMaskedLM", " as published, 16 x 512 tokens",
        _partial(_tokens, 16, 512, 30522), **_NO_DROPOUT,
    ),
    _hugging_face(
        "resnet50-imagenet", "ResNetForImageClassification",
        " as published, 64 images of 224 x 224", _partial(_images, 64, 224, 1000),
        num_labels=1000,
    ),
    _gpt_model("tiny", "as gpt, with 3 layers of width 192, for --quick", (3, 192, 2, 32), 1),
    _gpt_model("small", "as gpt, with 2 layers of width 128; 8 x 64 bytes", (2, 128, 4, 64), 8),
)  # fmt: skip
MODELS: Mapping[str, Model] = {model.name: model for model in _ALL}


def main() -> None:
    print("| model | parameters, M | gradients, MB | what it is |\n|---|--:|--:|---|")
    for model in MODELS.values():
        try:
            millions = model.num_parameters() / 1e6
            sizes = f"{millions:.1f} | {4 * millions:.0f} | {model.description}"
        except MissingPackageError as error:
            sizes = f"- | - | {error}"
        print(f"| {model.name} | {sizes} |")


if __name__ == "__main__":
    main()
