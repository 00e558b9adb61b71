"""What the zoo has plans for. `memfit zoo build` makes those that are missing.

Sizes on "cpu" are those of the standard benchmark cases, whose step takes about a second on two cores; the plans
rest on operators timed on the machine that built them. Sizes for other devices are such that the unplanned step
fills a good part of the device, or does not fit it; batch sizes on the T4 are those of the published schedules of
MONeT for cards of 16 GB.
"""

import dataclasses

FRACTIONS = (0.66, 0.5, 0.33)  # of the activation part; beside them the smallest that is found

_LANGUAGE_INPUTS = ("input_ids", "labels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One training step, by names alone: nothing is imported for it."""

    name: str
    reference: str  # as `--model` takes it
    inputs: tuple[str, ...]  # as `--input` takes them
    batch_size: int
    devices: tuple[str, ...]
    optimizer: str
    outputs: str = "all"
    dtype: str | None = None


def _vision(name: str, batch_size: int, size: str, *devices: str, reference: str | None = None) -> Case:
    return Case(
        name=name,
        reference=reference or f"torchvision.models.{name}()",
        inputs=(f"{batch_size}x3x{size}",),
        batch_size=batch_size,
        devices=devices,
        optimizer="sgd",
    )


def _language(name: str, batch_size: int, tokens: int, *devices: str, reference: str, dtype: str | None = None) -> Case:
    return Case(
        name=name,
        reference=reference,
        inputs=tuple(f"{each}={batch_size}x{tokens}:int64" for each in _LANGUAGE_INPUTS),
        batch_size=batch_size,
        devices=devices,
        optimizer="adamw",
        outputs="loss",
        dtype=dtype,
    )


_GOOGLENET = "torchvision.models.googlenet(aux_logits=False, init_weights=False)"
_UNET = "memfit.zoo.unet:UNet(3, 2)"
_GPT2 = "transformers:GPT2LMHeadModel()"
_BERT = "transformers:BertForMaskedLM()"
_LLAMA_1B = (
    "transformers:LlamaForCausalLM(vocab_size=128256, hidden_size=2048, intermediate_size=8192, "
    "num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True)"
)

CASES = (
    _vision("resnet50", 16, "128x128", "cpu"),
    _vision("googlenet", 16, "160x160", "cpu", reference=_GOOGLENET),
    _vision("mobilenet_v2", 16, "160x160", "cpu"),
    _vision("vgg16", 8, "128x128", "cpu"),
    _vision("vit_b_16", 4, "224x224", "cpu"),
    _vision("unet", 2, "192x192", "cpu", reference=_UNET),
    _language("gpt2", 4, 128, "cpu", reference=_GPT2),
    _language("bert", 8, 128, "cpu", reference=_BERT),
    _vision("resnet50", 184, "224x224", "T4", "A100-40GB"),
    _vision("googlenet", 320, "224x224", "T4", reference=_GOOGLENET),
    _vision("mobilenet_v2", 272, "224x224", "T4"),
    _vision("vgg16", 176, "224x224", "T4"),
    _vision("unet", 11, "416x608", "T4", reference=_UNET),
    _vision("vit_b_16", 128, "224x224", "A100-40GB"),
    _language("gpt2", 16, 1024, "A100-40GB", "H100-80GB", reference=_GPT2),
    _language("bert", 32, 512, "A100-40GB", reference=_BERT),
    _language("llama-1b", 4, 2048, "H100-80GB", reference=_LLAMA_1B, dtype="bfloat16"),
)


def step_name(case: Case, device: str) -> str:
    """What plans of one case on one device have in common in their names.

    >>> step_name(CASES[0], "cpu")
    'resnet50-x16-cpu'
    """
    return f"{case.name}-x{case.batch_size}-{device.lower()}"


def plan_name(case: Case, device: str, share: float | None) -> str:
    """The name of a plan: the model, the batch, the device, and the share of the activation part.

    >>> plan_name(CASES[0], "cpu", 0.5), plan_name(CASES[0], "A100-40GB", None)
    ('resnet50-x16-cpu-0.50', 'resnet50-x16-a100-40gb-smallest')
    """
    ending = "smallest" if share is None else f"{share:.2f}"
    return f"{step_name(case, device)}-{ending}"
