"""Train a small language model with every technique of a training step, stop, and go on bit for bit.

python examples/step.py
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import memfit
from memfit.measure.peak import measure_peak
from memfit.units import format_bytes

vocabulary, width, tokens, sentences = 500, 256, 16, 8
console = Console()


class Model(nn.Module):
    """Residual layers between a tied embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(4)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight  # tied
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> memfit.Mean:
    # A mean over tokens that is not divided yet: micro-batches with unequal lengths add up to the whole batch's mean.
    labels = batch["labels"].flatten()
    total = F.cross_entropy(model(batch["words"]).flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    return memfit.Mean(total, (labels != -100).sum())


def make_batch(number: int) -> dict[str, torch.Tensor]:
    own = torch.Generator().manual_seed(number)
    words = torch.randint(vocabulary, (sentences, tokens), generator=own)
    labels = words.roll(-1, 1)
    for row in range(sentences):  # sentences of unequal lengths
        labels[row, tokens - row :] = -100
    return {"words": words, "labels": labels}


def make_step(**techniques: object) -> memfit.Step:
    torch.manual_seed(0)
    model = Model()
    return memfit.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss, **techniques)


with tempfile.TemporaryDirectory() as directory:
    # 1. What each technique does to the peak. All but the precisions leave the numbers as they are.
    for techniques in (
        {},
        {"micro_batches": 4},
        {"update": "inside"},
        {"state_tier": "disk", "directory": directory},
        {"update": "inside", "state_tier": "disk", "directory": directory},
        {"precision": "bf16"},
        {"precision": "pure-bf16", "update": "inside"},
    ):
        step = make_step(**techniques)
        first, batch = step(make_batch(0)), make_batch(1)
        on_disk = step.policy.state_tier == "disk"
        resident = [step.model, batch, *([] if on_disk else [step.optimizer])]
        peak = measure_peak(lambda step=step, batch=batch: step(batch), resident=resident).peak_bytes
        names = ", ".join(f"{name}={value!r}" for name, value in techniques.items() if name != "directory")
        console.print(f"{names or 'plain':42} loss {first:.4f}  peak {format_bytes(peak)}", highlight=False)

    # 2. One budget instead: the techniques are chosen, and the reasons can be read.
    chosen = make_step(budget=0.7, sample=make_batch(0), directory=directory, time_limit=5.0)
    console.print(chosen.choice.explain(), highlight=False, soft_wrap=True)
    largest = memfit.max_batch(chosen.model, make_batch(0), "64MiB", optimizer="adamw", loss=loss)
    console.print(f"largest batch: {largest!r}", highlight=False)

    # 3. Stop after three steps, go on in another step, and compare with the run that never stopped.
    checkpoint = Path(directory) / "run.safetensors"
    whole, stopped = make_step(update="inside"), make_step(update="inside")
    losses = [whole(make_batch(number)) for number in range(6)]
    for number in range(3):
        stopped(make_batch(number))
    stopped.save(checkpoint)
    resumed = make_step(update="inside")
    resumed.load(checkpoint)
    again = [resumed(make_batch(number)) for number in range(resumed.position.batches, 6)]
    same = all(torch.equal(one, other) for one, other in zip(losses[3:], again, strict=True))
    console.print(f"resumed run equals the uninterrupted one bit for bit: {same}")

    # 4. Build a model without memory and fill it from a file, straight into bf16.
    with memfit.init(dtype=torch.bfloat16, weights=False):
        model = Model()
    weights = Path(directory) / "weights.safetensors"
    memfit.save(whole.model, weights)
    memfit.load(model, weights)
    console.print(
        f"loaded {sum(each.numel() for each in model.parameters()):,} parameters as {model.head.weight.dtype}"
    )

if not same:
    raise SystemExit("the resumed run differs")
