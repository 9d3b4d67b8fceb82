"""Which architectures are trained, as data, and how a tiny one with random weights is made.

Names are the libraries' own. Nothing here trains or compiles.

[Note: tiny]
transformers: each size in `_TINY` goes to the configurations that have one of that name and type;
`settings` has the rest. timm: its own test models, or the arguments that make a model small.
Dropout is off, except where an architecture keeps it, so that runs can be compared.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

_BATCH = 2
_TOKENS = 12
_IMAGE = 32
_NUM_CLASSES = 5
_VOCABULARY = 99

_TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "hidden_dim", "n_inner"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "d_kv": 8,
    "vocab_size": _VOCABULARY,
    "image_size": _IMAGE,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model. `head` is the class of transformers that makes it, "" for timm's.

    `feed` says what it takes. `settings` go into the configuration, or to `timm.create_model`.
    """

    name: str
    model: str
    head: str = ""
    feed: str = "image"
    settings: dict[str, Any] = field(default_factory=dict)
    has_dropout: bool = False

    @property
    def library(self) -> str:
        """The package that it is from."""
        return "transformers" if self.head else "timm"


class Batch(NamedTuple):
    """What a model is called with, and what its output is compared with (None: it has a loss)."""

    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    labels: torch.Tensor | None


def build(architecture: Architecture) -> nn.Module:
    """Return the model, in training mode."""
    _load_torchvision()
    if architecture.head:
        return _build_transformers(architecture).train()
    import timm

    owner, _, name = architecture.model.rpartition(".")
    make = getattr(getattr(timm.models, owner), name) if owner else timm.create_model
    arguments = () if owner else (name,)
    model: nn.Module = make(*arguments, num_classes=_NUM_CLASSES, **architecture.settings)
    return model.train()


# What is fed by which name, of what `draw_batch` draws.
_FEEDS = {
    "image": {"pixel_values": "images", "labels": "classes"},
    "pretraining": {"pixel_values": "images"},
    "text": {"input_ids": "tokens", "labels": "tokens"},
    "padded text": {"input_ids": "tokens", "attention_mask": "mask", "labels": "tokens"},
    "classes": {"input_ids": "tokens", "labels": "classes"},
    "image and text": {"input_ids": "tokens", "pixel_values": "images", "return_loss": "yes"},
    "captions": {"input_ids": "tokens", "pixel_values": "images", "labels": "tokens"},
    "wave": {"input_values": "wave", "labels": "classes"},
    "spectrum": {"input_features": "spectrum", "labels": "tokens"},
}


def draw_batch(architecture: Architecture, generator: torch.Generator) -> Batch:
    """Return random inputs for a model."""
    settings = architecture.settings
    size = settings.get("image_size", settings.get("img_size", _IMAGE))
    mask = torch.ones(_BATCH, _TOKENS, dtype=torch.int64)
    mask[0, -3:] = 0
    drawn: dict[str, Any] = {
        "tokens": torch.randint(3, _VOCABULARY, (_BATCH, _TOKENS), generator=generator),
        "mask": mask,
        "images": torch.randn(_BATCH, 3, size, size, generator=generator),
        "classes": torch.randint(0, 2, (_BATCH,), generator=generator),
        "wave": torch.randn(_BATCH, 800, generator=generator),
        "spectrum": torch.randn(_BATCH, *settings.get("spectrum", ()), generator=generator),
        "yes": True,
    }
    if not architecture.head:
        return Batch((drawn["images"],), {}, drawn["classes"])
    feed = _FEEDS[architecture.feed]
    return Batch((), {name: copy.deepcopy(drawn[what]) for name, what in feed.items()}, None)


def _build_transformers(architecture: Architecture) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    settings = {k: v for k, v in architecture.settings.items() if k != "spectrum"}
    default = transformers.AutoConfig.for_model(architecture.model)
    sizes = {name: size for name, size in _TINY.items() if _takes_number(default, name)}
    config = transformers.AutoConfig.for_model(architecture.model, **{**sizes, **settings})
    if not architecture.has_dropout:
        _turn_dropout_off(config)
    model: nn.Module = getattr(transformers, architecture.head).from_config(config)
    return model


def _takes_number(config: Any, name: str) -> bool:
    """Whether a configuration has a size of this name that can be set, one number for all."""
    if isinstance(getattr(type(config), name, None), property):
        return False
    missing = object()
    return isinstance(getattr(config, name, missing), int | None)


def _turn_dropout_off(config: Any) -> None:
    """Set all rates of dropout to zero, also those of configurations in this one."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _turn_dropout_off(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def _load_torchvision() -> None:
    """Make torchvision load where its operators do not: PyTorch's CPU wheels have no build of it.

    timm needs it, transformers imports it where it is there; no model here uses its operators.
    """
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        pass
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in ("nms", "qnms"):
            _TORCHVISION.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")


_TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")  # what is defined goes with it


def _rows(head: str, feed: str, names: str) -> list[Architecture]:
    """Return architectures that need no settings, by the names of their configurations."""
    return [Architecture(name=n, model=n, head=head, feed=feed) for n in names.split()]


def _row(name: str, head: str, feed: str, **settings: Any) -> Architecture:
    return Architecture(name=name, model=name, head=head, feed=feed, settings=settings)


def _timm(model: str, **settings: Any) -> Architecture:
    """Return a model of timm: a name that it registers, or the `module.Class` of one."""
    return Architecture(name=f"timm {model.rpartition('.')[2]}", model=model, settings=settings)


_CAUSAL, _MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
_SEQUENCES, _IMAGES = "AutoModelForSeq2SeqLM", "AutoModelForImageClassification"

# fmt: off
_TEXT_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 99,
               "num_attention_heads": 4, "max_position_embeddings": 64}
_VISION_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
_LINEAR_ATTENTION = {"linear_num_value_heads": 4, "linear_num_key_heads": 2,
                     "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_LATENT_ATTENTION = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                     "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
_PYRAMID = {"hidden_sizes": [8, 16], "depths": [1, 1]}
_WINDOWS = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2,
            "patch_size": 4}

_TRANSFORMERS = [
    *_rows(
        _CAUSAL,
        "text",
        "gpt2 gpt_neox bloom mpt opt falcon llama mistral mixtral qwen3 qwen3_moe gemma2 "
        "gemma3_text phi3 olmoe granitemoe gpt_oss llama4_text minimax mamba rwkv lfm2 "
        "modernbert-decoder xlm",
    ),
    _row("gptj", _CAUSAL, "text", rotary_dim=8),
    _row("gpt_neo", _CAUSAL, "text", attention_types=[[["global", "local"], 1]]),
    _row("deepseek_v3", _CAUSAL, "text", n_group=2, topk_group=1, **_LATENT_ATTENTION),
    _row("qwen3_next", _CAUSAL, "text", layer_types=["linear_attention", "full_attention"],
         **_LINEAR_ATTENTION),
    _row("mamba2", _CAUSAL, "text", num_heads=8, n_groups=2, state_size=16, chunk_size=8),
    _row("bamba", _CAUSAL, "text", mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1,
         mamba_d_state=16, mamba_chunk_size=8, attn_layer_indices=[1]),
    _row("jamba", _CAUSAL, "text", attn_layer_offset=1, attn_layer_period=2, mamba_d_state=8,
         mamba_dt_rank=4, use_mamba_kernels=False),
    _row("recurrent_gemma", _CAUSAL, "text", block_types=["recurrent", "attention"], lru_width=32),
    *_rows(
        _MASKED,
        "text",
        "bert roberta albert distilbert electra deberta-v2 convbert longformer big_bird mobilebert "
        "squeezebert modernbert nystromformer fnet esm",
    ),
    _row("funnel", _MASKED, "text", block_sizes=[1, 1], d_inner=64, d_head=8),
    _row("reformer", _MASKED, "text", is_decoder=False, axial_pos_embds_dim=[16, 16],
         axial_pos_shape=[3, 4], attention_head_size=8, feed_forward_size=64,
         attn_layers=["local", "local"], local_attn_chunk_length=4),
    _row("xlnet", "AutoModelForSequenceClassification", "classes", d_inner=64),
    *_rows(_SEQUENCES, "text", "bart m2m_100 pegasus_x prophetnet"),
    *(
        _row(name, _SEQUENCES, "text", decoder_start_token_id=0)
        for name in ("t5", "switch_transformers", "longt5")
    ),
    _row("led", _SEQUENCES, "text", max_encoder_position_embeddings=64,
         max_decoder_position_embeddings=64, attention_window=8),
    *_rows(_IMAGES, "image", "vit beit dinov2"),
    _row("swin", _IMAGES, "image", **_WINDOWS),
    _row("swinv2", _IMAGES, "image", **_WINDOWS),
    _row("convnextv2", _IMAGES, "image", num_stages=2, patch_size=4, **_PYRAMID),
    _row("resnet", _IMAGES, "image", embedding_size=8, **_PYRAMID),
    _row("focalnet", _IMAGES, "image", embed_dim=16, focal_levels=[2, 2], focal_windows=[3, 3],
         patch_size=4, **_PYRAMID),
    _row("segformer", _IMAGES, "image", num_encoder_blocks=2, num_attention_heads=[1, 2],
         sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], **_PYRAMID),
    _row("mobilevit", _IMAGES, "image", hidden_sizes=[16, 24, 32], patch_size=2, image_size=64,
         neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64]),
    _row("vit_mae", "AutoModelForPreTraining", "pretraining", decoder_hidden_size=16,
         decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32),
    _row("clip", "AutoModel", "image and text", projection_dim=16,
         text_config={**_TEXT_TOWER, "eos_token_id": 2}, vision_config=_VISION_TOWER),
    _row("siglip", "AutoModel", "image and text",
         text_config={**_TEXT_TOWER, "projection_size": 32}, vision_config=_VISION_TOWER),
    _row("git", _CAUSAL, "captions", vision_config=_VISION_TOWER),
    _row("wav2vec2", "AutoModelForAudioClassification", "wave", conv_dim=[16, 16],
         conv_kernel=[10, 3], conv_stride=[5, 2], num_feat_extract_layers=2,
         num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, classifier_proj_size=16,
         apply_spec_augment=False),
    _row("whisper", "AutoModelForSpeechSeq2Seq", "spectrum", spectrum=(8, 24), num_mel_bins=8,
         max_source_positions=12, max_target_positions=64),
    _row("speech_to_text", "AutoModelForSpeechSeq2Seq", "spectrum", spectrum=(24, 8),
         input_feat_per_channel=8, conv_channels=16, conv_kernel_sizes=[3], num_conv_layers=1,
         max_source_positions=64, max_target_positions=64),
    *(
        Architecture(name=f"{name} with padding", model=name, head=head, feed="padded text")
        for name, head in (("bert", _MASKED), ("llama", _CAUSAL))
    ),
    *(
        Architecture(
            name=f"{name} with dropout", model=name, head=head, feed="text", has_dropout=True
        )
        for name, head in (("bert", _MASKED), ("gpt2", _CAUSAL), ("bart", _SEQUENCES))
    ),
]

_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
_STAGES = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 32), "num_heads": (1, 2, 2, 4)}

_TIMM = [
    _timm("test_byobnet"),
    _timm("test_convnext"),
    _timm("test_efficientnet"),
    _timm("test_mambaout"),
    _timm("test_nfnet"),
    _timm("test_resnet"),
    _timm("test_coatnet", img_size=64),
    _timm("vit_tiny_patch16_224", **_VIT),
    _timm("beit_base_patch16_224", **_VIT),
    _timm("eva02_tiny_patch14_224", **_VIT),
    _timm("cait_xxs24_224", **_VIT),
    _timm("xcit_nano_12_p16_224", **_VIT),
    _timm("mlp_mixer.MlpMixer", img_size=32, patch_size=8, embed_dim=32, num_blocks=2),
    _timm("swin_tiny_patch4_window7_224", img_size=32, embed_dim=16, depths=(1, 1),
          num_heads=(2, 2), window_size=4),
    _timm("twins.Twins", img_size=64, wss=(2, 2, 2, 2), **_STAGES),
    _timm("tiny_vit.TinyVit", window_sizes=(2, 2, 2, 2), **_STAGES),
    _timm("metaformer.MetaFormer", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    _timm("davit.DaVit", depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 2), window_size=4),
    _timm("densenet.DenseNet", growth_rate=8, block_config=(2, 2)),
    _timm("edgenext.EdgeNeXt", dims=(8, 16, 16, 32), depths=(1, 1, 2, 2), heads=(2, 2, 2, 2)),
    _timm("fastvit.FastVit", layers=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32)),
    _timm("crossvit.CrossVit", img_size=64, embed_dim=(16, 32), depth=((1, 1, 0), (1, 1, 0)),
          num_heads=(2, 2)),
    _timm("nest.Nest", img_size=32, embed_dims=(8, 16, 32), num_heads=(1, 2, 2), depths=(1, 1, 1)),
    _timm("tnt.TNT", img_size=32, patch_size=8, embed_dim=32, inner_dim=8, depth=2,
          num_heads_inner=2, num_heads_outer=4),
    _timm("volo.VOLO", img_size=32, patch_size=8, stem_hidden_dim=8, layers=(1, 1),
          embed_dims=(16, 32), num_heads=(2, 2), use_aux_head=False),
    _timm("sequencer2d_s", img_size=32, layers=(1, 1), embed_dims=(16, 16), patch_sizes=(4, 2),
          hidden_sizes=(8, 8), mlp_ratios=(2, 2)),
    _timm("mobilenetv3_small_050"),
]
# fmt: on

ARCHITECTURES = {row.name: row for row in [*_TRANSFORMERS, *_TIMM]}

# Compiled by Inductor too, which takes a minute each.
ON_INDUCTOR = (
    *("gpt2", "llama", "bert", "t5", "mixtral", "vit", "clip", "whisper", "mamba2"),
    *("timm test_resnet", "timm test_convnext", "timm vit_tiny_patch16_224"),
)
