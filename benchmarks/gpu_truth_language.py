"""Language models of transformers that others have trained on real GPUs, made without their weights."""

from typing import Any

import torch
from torch import nn


def outputs_in_a_variable(model: Any, batch: Any) -> Any:
    outputs = model(**batch)
    held = [each for name, each in outputs.items() if name != "loss" and isinstance(each, torch.Tensor)]
    return outputs.loss, *held, *_cached(outputs)


def _cached(outputs: Any) -> list[torch.Tensor]:
    """Return keys and values that a language model returns for a next call, which there is none of in training."""
    cache = outputs.get("past_key_values")
    caches = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    found = [each for each in (*caches, cache) if hasattr(each, "layers")]
    return [each for one in found for layer in one.layers for each in (layer.keys, layer.values)]


def causal(kind: str, **options: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**options)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.train()


def gpt_neo() -> nn.Module:
    return causal("GPTNeo", hidden_size=768, num_layers=12, num_heads=12, attention_types=[[["global", "local"], 6]])


def qwen3() -> nn.Module:
    return causal(
        "Qwen3",
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    )


def qwen2() -> nn.Module:
    return causal(
        "Qwen2",
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=False,
    )


def t5() -> nn.Module:
    import transformers

    model: nn.Module = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=32128, decoder_start_token_id=0)
    )
    return model.train()


def bert() -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )
    tokens = torch.empty(4, 512, dtype=torch.int64)
    labels = torch.empty(4, dtype=torch.int64)
    model = transformers.BertForSequenceClassification(config).train()
    return model, {"input_ids": tokens, "labels": labels}
