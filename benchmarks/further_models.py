"""Twenty further models, as users of torchvision, timm and transformers call them; none of them was tuned for.

Twelve for images and eight for words, sounds and both, without downloads, at sizes whose eager step takes about 0.2
to 2 s on two cores. What their users pass along is passed here: labels, masks, `use_cache=False`, `return_loss=True`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import Case

_CLASSES = 1000
_AUXILIARY = 0.4  # how much an auxiliary classifier counts, as in torchvision's training scripts


def further_cases() -> list[Case]:
    """All twenty."""
    return [*_of_images(), *_of_words(), _whisper(), _clip()]


def _of_images() -> list[Case]:
    return [
        _torchvision("DenseNet-121", "densenet121", 128, 16),
        _timm("EfficientNet-B0", "efficientnet_b0", 128, 16),
        _torchvision("EfficientNetV2-S", "efficientnet_v2_s", 128, 8),
        _torchvision("RegNet-Y-400MF", "regnet_y_400mf", 160, 24),
        _timm("ConvNeXt-T", "convnext_tiny", 128, 8),
        _torchvision("Swin-T", "swin_t", 128, 8),
        _timm("MaxViT-T", "maxvit_tiny_tf_224", 128, 4, img_size=128),
        _timm("MobileNetV3-L", "mobilenetv3_large_100", 160, 24),
        _torchvision("ShuffleNetV2", "shufflenet_v2_x1_0", 224, 32),
        _inception(),
        _torchvision("ResNeXt-50", "resnext50_32x4d", 128, 8),
        _deeplab(),
    ]


def _torchvision(name: str, model: str, pixels: int, batch_size: int) -> Case:
    def make_model() -> nn.Module:
        import torchvision

        built: nn.Module = getattr(torchvision.models, model)(weights=None)
        return built

    return _classifier(name, make_model, pixels, batch_size)


def _timm(name: str, model: str, pixels: int, batch_size: int, **options: Any) -> Case:
    def make_model() -> nn.Module:
        import timm

        built: nn.Module = timm.create_model(model, pretrained=False, num_classes=_CLASSES, **options)
        return built

    return _classifier(name, make_model, pixels, batch_size)


def _classifier(name: str, make_model: Callable[[], nn.Module], pixels: int, batch_size: int) -> Case:
    return Case(
        name=name,
        batch_size=batch_size,
        make_model=make_model,
        make_batch=lambda size: (torch.randn(size, 3, pixels, pixels), torch.randint(_CLASSES, (size,))),
        loss=lambda module, batch: F.cross_entropy(module(batch[0]), batch[1], label_smoothing=0.1),
        sample=lambda batch: (batch[0],),
    )


def _inception() -> Case:
    """Inception-v3 with its auxiliary classifier, which needs images of 299 pixels."""

    def make_model() -> nn.Module:
        import torchvision

        built: nn.Module = torchvision.models.inception_v3(weights=None, init_weights=False)
        return built

    def loss(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        found = module(batch[0])
        return F.cross_entropy(found.logits, batch[1]) + _AUXILIARY * F.cross_entropy(found.aux_logits, batch[1])

    return Case(
        name="Inception-v3",
        batch_size=4,
        make_model=make_model,
        make_batch=lambda size: (torch.randn(size, 3, 299, 299), torch.randint(_CLASSES, (size,))),
        loss=loss,
        sample=lambda batch: (batch[0],),
    )


def _deeplab() -> Case:
    """DeepLabV3 on MobileNetV3 with its auxiliary head: a dictionary of outputs."""
    classes, ignored, pixels = 21, 255, 160

    def make_model() -> nn.Module:
        import torchvision

        built: nn.Module = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=classes, aux_loss=True
        )
        return built

    def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        target = torch.randint(classes, (size, pixels, pixels))
        target[:, :4] = ignored  # borders between objects
        return torch.randn(size, 3, pixels, pixels), target

    def loss(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        found = module(batch[0])
        whole, auxiliary = (F.cross_entropy(found[key], batch[1], ignore_index=ignored) for key in ("out", "aux"))
        return whole + 0.5 * auxiliary

    return Case(
        name="DeepLabV3",
        batch_size=8,
        make_model=make_model,
        make_batch=make_batch,
        loss=loss,
        sample=lambda batch: (batch[0],),
    )


def _of_words() -> list[Case]:
    small: dict[str, Any] = {
        "vocab_size": 16_000,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    t5: dict[str, Any] = {
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_heads": 8,
        "decoder_start_token_id": 0,
    }
    return [
        _transformers("T5-small", "T5ForConditionalGeneration", "T5Config", _pairs_of_texts(32_000, 64), 4, **t5),
        _transformers(
            "BART-base", "BartForConditionalGeneration", "BartConfig", _pairs_of_texts(50_000, 64), 2,
            d_model=768, encoder_layers=6, decoder_layers=6, encoder_attention_heads=12, decoder_attention_heads=12,
            encoder_ffn_dim=3072, decoder_ffn_dim=3072,
        ),
        _transformers(
            "DeBERTa-base", "DebertaV2ForMaskedLM", "DebertaV2Config", _masked_words(32_000, 96), 2, with_cache=False,
            vocab_size=32_000, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
            relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=256, norm_rel_ebd="layer_norm",
            share_att_key=True,
        ),
        _transformers("Llama", "LlamaForCausalLM", "LlamaConfig", _next_words(16_000, 128), 4, **small),
        _transformers("Qwen", "Qwen3ForCausalLM", "Qwen3Config", _next_words(16_000, 128), 4, **small, head_dim=64),
        _transformers("Gemma", "Gemma2ForCausalLM", "Gemma2Config", _next_words(16_000, 128), 4, **small, head_dim=64),
    ]  # fmt: skip


def _transformers(
    name: str,
    model: str,
    config: str,
    make_batch: Callable[[int], dict[str, Any]],
    batch_size: int,
    *,
    with_cache: bool = True,
    **settings: Any,
) -> Case:
    """A model that returns its loss; those that write caches are told not to."""
    constants = {"use_cache": False} if with_cache else {}

    def make_model() -> nn.Module:
        import transformers

        built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return built

    return Case(
        name=name,
        batch_size=batch_size,
        make_model=make_model,
        make_batch=lambda size: make_batch(size) | constants,
        loss=lambda module, batch: module(**batch).loss,
        sample=lambda batch: batch,
        outputs="loss",
    )


def _mask(size: int, tokens: int) -> torch.Tensor:
    """Return which words count: texts differ in length, and are filled up behind."""
    lengths = torch.randint(tokens // 2, tokens + 1, (size, 1))
    lengths[0] = tokens
    return (torch.arange(tokens) < lengths).long()


def _texts(words: int, size: int, tokens: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(4, words, (size, tokens)), "attention_mask": _mask(size, tokens)}


def _next_words(words: int, tokens: int) -> Callable[[int], dict[str, Any]]:
    def make(size: int) -> dict[str, Any]:
        batch = _texts(words, size, tokens)
        return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    return make


def _masked_words(words: int, tokens: int) -> Callable[[int], dict[str, Any]]:
    def make(size: int) -> dict[str, Any]:
        batch = _texts(words, size, tokens)
        is_asked = torch.rand(size, tokens) < 0.15
        return batch | {"labels": batch["input_ids"].masked_fill(~is_asked, -100)}

    return make


def _pairs_of_texts(words: int, tokens: int) -> Callable[[int], dict[str, Any]]:
    def make(size: int) -> dict[str, Any]:
        answer = _texts(words, size, tokens // 2)
        labels = answer["input_ids"].masked_fill(answer["attention_mask"] == 0, -100)
        return _texts(words, size, tokens) | {"labels": labels}

    return make


def _whisper() -> Case:
    def make_batch(size: int) -> dict[str, Any]:
        sounds = torch.randn(size, 80, 3000)  # thirty seconds
        return {"input_features": sounds, "labels": torch.randint(51_000, (size, 64))}

    return _transformers(
        "Whisper-tiny", "WhisperForConditionalGeneration", "WhisperConfig", make_batch, 1,
        d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6, decoder_attention_heads=6,
        encoder_ffn_dim=1536, decoder_ffn_dim=1536,
    )  # fmt: skip


def _clip() -> Case:
    """CLIP, which looks at pictures and reads their captions, with its contrastive loss."""
    tower = {"num_attention_heads": 6, "num_hidden_layers": 6, "hidden_size": 384, "intermediate_size": 1536}
    text = tower | {"vocab_size": 16_000, "eos_token_id": 2}
    vision = tower | {"image_size": 128, "patch_size": 16}

    def make_batch(size: int) -> dict[str, Any]:
        captions = _texts(16_000, size, 32)
        return captions | {"pixel_values": torch.randn(size, 3, 128, 128), "return_loss": True}

    return _transformers(
        "CLIP", "CLIPModel", "CLIPConfig", make_batch, 16, with_cache=False,
        text_config=text, vision_config=vision, projection_dim=256,
    )  # fmt: skip
