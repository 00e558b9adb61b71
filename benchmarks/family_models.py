"""Real architectures at tiny configurations, built without downloads."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.family_modules import DiffusionStep, GanStep, GraphNetwork, Recurrent, SequenceToSequence, UNet3d

Made = tuple[nn.Module, Any]  # a model in training mode and a sample

_WORDS, _TOKENS, _ROWS = 256, 64, 4
_SMALL = {
    "vocab_size": _WORDS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture, where it comes from, and how to make it."""

    name: str
    library: str
    make: Callable[[], Made]


def families() -> list[Family]:
    """All of them, by library."""
    return [*_language_models(), *_encoders(), *_both_ways(), *_vision(), *_timm(), *_torchvision(), *_plain()]


def _words(rows: int = _ROWS, tokens: int = _TOKENS) -> torch.Tensor:
    return torch.randint(3, _WORDS, (rows, tokens))


def _transformers(name: str, model: str, config: str, sample: Callable[[], Any], **options: Any) -> Family:
    def make() -> Made:
        import transformers

        settings = getattr(transformers, config)(**options)
        settings.use_cache = False
        return getattr(transformers, model)(settings).train(), sample()

    return Family(name=name, library="transformers", make=make)


def _causal() -> dict[str, torch.Tensor]:
    words = _words()
    return {"input_ids": words, "labels": words.clone()}


def _masked() -> dict[str, torch.Tensor]:
    return {"input_ids": _words(), "attention_mask": torch.ones(_ROWS, _TOKENS, dtype=torch.int64), "labels": _words()}


def _language_models() -> list[Family]:
    grouped = _SMALL | {"num_key_value_heads": 2}
    named: list[tuple[str, str, dict[str, Any]]] = [
        ("Llama", "Llama", grouped),
        ("Mistral", "Mistral", grouped),
        ("Qwen2", "Qwen2", grouped),
        ("Qwen3", "Qwen3", grouped | {"head_dim": 16}),
        ("Gemma", "Gemma", grouped | {"head_dim": 16}),
        ("Gemma 2", "Gemma2", grouped | {"head_dim": 16}),
        ("Phi", "Phi", _SMALL),
        ("Phi-3", "Phi3", grouped),
        ("GPT-NeoX", "GPTNeoX", _SMALL),
        ("StableLM", "StableLm", grouped),
        ("OLMo", "Olmo", grouped),
        ("Cohere", "Cohere", grouped),
        ("Mixtral", "Mixtral", grouped | {"num_local_experts": 4, "experts_implementation": "batched_mm"}),
        ("Mixtral (experts by rows)", "Mixtral", grouped | {"num_local_experts": 4, "experts_implementation": "eager"}),
        ("Mamba", "Mamba", {"vocab_size": _WORDS, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
    ]
    own = {"vocab_size": _WORDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 1}
    opt = {key: value for key, value in _SMALL.items() if key != "intermediate_size"}
    return [
        _transformers("GPT-2", "GPT2LMHeadModel", "GPT2Config", _causal, **own, eos_token_id=2),
        _transformers("GPT-J", "GPTJForCausalLM", "GPTJConfig", _causal, **own, eos_token_id=2, rotary_dim=8),
        _transformers("OPT", "OPTForCausalLM", "OPTConfig", _causal, **opt, ffn_dim=128, word_embed_proj_dim=64),
        _transformers(
            "Bloom", "BloomForCausalLM", "BloomConfig", _causal, vocab_size=_WORDS, hidden_size=64, n_layer=2, n_head=4
        ),
        *(
            _transformers(name, f"{kind}ForCausalLM", f"{kind}Config", _causal, **options)
            for name, kind, options in named
        ),
    ]


def _encoders() -> list[Family]:
    distil = {"vocab_size": _WORDS, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}
    return [
        _transformers("BERT", "BertForMaskedLM", "BertConfig", _masked, **_SMALL),
        _transformers("RoBERTa", "RobertaForMaskedLM", "RobertaConfig", _masked, **_SMALL),
        _transformers("DeBERTa-v2", "DebertaV2ForMaskedLM", "DebertaV2Config", _masked, **_SMALL),
        _transformers("ELECTRA", "ElectraForMaskedLM", "ElectraConfig", _masked, **_SMALL, embedding_size=32),
        _transformers("ALBERT", "AlbertForMaskedLM", "AlbertConfig", _masked, **_SMALL, embedding_size=32),
        _transformers("DistilBERT", "DistilBertForMaskedLM", "DistilBertConfig", _masked, **distil),
    ]


def _both_ways() -> list[Family]:
    bart = {
        "vocab_size": _WORDS,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
    }

    def heard() -> dict[str, torch.Tensor]:
        return {"input_features": torch.randn(2, 80, 128), "labels": _words(2, 32)}

    t5 = {"vocab_size": _WORDS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    return [
        _transformers(
            "T5", "T5ForConditionalGeneration", "T5Config", _causal, **t5, decoder_start_token_id=0, pad_token_id=0
        ),
        _transformers("BART", "BartForConditionalGeneration", "BartConfig", _causal, **bart, max_position_embeddings=128),
        _transformers(
            "Whisper", "WhisperForConditionalGeneration", "WhisperConfig", heard, **bart,
            max_source_positions=64, max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
        ),
    ]  # fmt: skip


def _vision() -> list[Family]:
    def seen() -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.randn(_ROWS, 3, 64, 64), "labels": torch.randint(2, (_ROWS,))}

    def seen_and_read() -> dict[str, Any]:
        return {"pixel_values": torch.randn(_ROWS, 3, 64, 64), "input_ids": _words(_ROWS, 16), "return_loss": True}

    def cut_out() -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.randn(_ROWS, 3, 64, 64), "labels": torch.randint(2, (_ROWS, 64, 64))}

    vit = {key: _SMALL[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
    patches = vit | {"image_size": 64, "patch_size": 8}
    text = _SMALL | {"max_position_embeddings": 32}
    return [
        _transformers("ViT", "ViTForImageClassification", "ViTConfig", seen, **patches),
        _transformers("DeiT", "DeiTForImageClassification", "DeiTConfig", seen, **patches),
        _transformers("BEiT", "BeitForImageClassification", "BeitConfig", seen, **patches),
        _transformers(
            "CLIP", "CLIPModel", "CLIPConfig", seen_and_read, text_config=text, vision_config=patches, projection_dim=32
        ),
        _transformers(
            "Swin", "SwinForImageClassification", "SwinConfig", seen, image_size=64, patch_size=4, embed_dim=24,
            depths=[2, 2], num_heads=[2, 4], window_size=4,
        ),
        _transformers(
            "SegFormer", "SegformerForSemanticSegmentation", "SegformerConfig", cut_out, hidden_sizes=[16, 32, 48, 64],
            depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=64,
        ),
        _transformers(
            "ConvNeXt V2", "ConvNextV2ForImageClassification", "ConvNextV2Config", seen, hidden_sizes=[16, 32, 48, 64],
            depths=[1, 1, 2, 1],
        ),
        _detr(),
    ]  # fmt: skip


def _detr() -> Family:
    def make() -> Made:
        from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

        backbone = ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], out_features=["stage4"]
        )
        config = DetrConfig(
            backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
            d_model=64, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=128, decoder_ffn_dim=128,
            encoder_attention_heads=4, decoder_attention_heads=4, num_queries=10,
        )  # fmt: skip
        return DetrForObjectDetection(config).train(), {"pixel_values": torch.randn(2, 3, 128, 128)}

    return Family(name="DETR", library="transformers", make=make)


def _timm() -> list[Family]:
    def family(name: str, model: str, pixels: int = 64, **options: Any) -> Family:
        def make() -> Made:
            import timm

            return timm.create_model(model, pretrained=False, num_classes=10, **options).train(), (
                torch.randn(_ROWS, 3, pixels, pixels),
            )

        return Family(name=name, library="timm", make=make)

    return [
        family("ResNet-26", "resnet26"),
        family("RegNetY", "regnety_002"),
        family("EfficientNet-B0", "efficientnet_b0"),
        family("ConvNeXt", "convnext_atto"),
        family("DenseNet-121", "densenet121"),
        family("MobileNetV3", "mobilenetv3_small_100"),
        family("MaxViT", "maxvit_tiny_tf_224", 64, img_size=64),
        family("MLP-Mixer", "mixer_s32_224", 64, img_size=64),
        family("GhostNet", "ghostnet_050"),
        family("EdgeNeXt", "edgenext_xx_small"),
    ]


def _torchvision() -> list[Family]:
    def family(name: str, make_model: Callable[[Any], nn.Module], pixels: int = 64) -> Family:
        def make() -> Made:
            import torchvision

            return make_model(torchvision.models).train(), (torch.randn(_ROWS, 3, pixels, pixels),)

        return Family(name=name, library="torchvision", make=make)

    def pyramid(_models: Any) -> nn.Module:
        from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

        built: nn.Module = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)
        return built

    bare = {"weights": None, "weights_backbone": None, "num_classes": 5}
    return [
        family("FCN (segmentation)", lambda models: models.segmentation.fcn_resnet50(**bare)),
        family("DeepLabV3 (segmentation)", lambda models: models.segmentation.deeplabv3_mobilenet_v3_large(**bare)),
        family("LR-ASPP (segmentation)", lambda models: models.segmentation.lraspp_mobilenet_v3_large(**bare)),
        family("feature pyramid (detection)", pyramid),
        family("GoogLeNet", lambda models: models.googlenet(aux_logits=False, init_weights=False, num_classes=10)),
        family("ShuffleNet V2", lambda models: models.shufflenet_v2_x0_5(num_classes=10)),
        family("SqueezeNet", lambda models: models.squeezenet1_1(num_classes=10)),
    ]


def _plain() -> list[Family]:
    def family(name: str, make: Callable[[], Made]) -> Family:
        return Family(name=name, library="torch", make=make)

    def transformer() -> Made:
        inner = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
        return SequenceToSequence(inner, _WORDS, 64), (_words(), _words())

    return [
        family("LSTM", lambda: (Recurrent(nn.LSTM(64, 64, 2, dropout=0.1, batch_first=True), _WORDS, 64), (_words(),))),
        family("GRU", lambda: (Recurrent(nn.GRU(64, 64, 2, batch_first=True), _WORDS, 64), (_words(),))),
        family("nn.Transformer", transformer),
        family("3-D UNet", lambda: (UNet3d(1, 2), (torch.randn(1, 1, 24, 24, 24),))),
        family(
            "graph network (index_add)",
            lambda: (GraphNetwork(16, 32, 3), (torch.randn(200, 16), torch.randint(200, (2, 1000)))),
        ),
        family("GAN step", lambda: (GanStep(), (torch.randn(8, 16), torch.randn(8, 1, 16, 16)))),
        family(
            "diffusion UNet step",
            lambda: (DiffusionStep(), (torch.randn(4, 3, 32, 32), torch.randn(4, 3, 32, 32), torch.rand(4))),
        ),
    ]
