"""What bf16 costs in loss: fp32, plain bf16, and bf16 with stochastic rounding on a small language model.

    python -m benchmarks.rounding
    python -m benchmarks.rounding --results FILE   # also write the figures as JSON

The language is a Markov chain of second order, so its entropy (the best loss there is) is known. All three start from
the same parameters, see the same batches and end with the learning rate at zero.
"""

import argparse
import copy
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.files import write_atomically

SYMBOLS = 32
TOKENS = 64
WIDTH = 64
STEPS = 1500
BATCH = 16
LEARNING_RATE = 1e-3


class Language:
    """Every symbol depends on the two before it."""

    def __init__(self) -> None:
        self._own = torch.Generator().manual_seed(0)
        chances = torch.randn(SYMBOLS, SYMBOLS, SYMBOLS, generator=self._own) * 2
        self.chances = chances.softmax(-1)

    def batch(self, count: int) -> torch.Tensor:
        words = [torch.randint(SYMBOLS, (count,), generator=self._own) for _ in range(2)]
        for _ in range(TOKENS - 1):
            chance = self.chances[words[-2], words[-1]]
            words.append(torch.multinomial(chance, 1, generator=self._own).squeeze(1))
        return torch.stack(words, 1)


class Transformer(nn.Module):
    """Two layers; the embedding has values around one, where a bf16 step is 2^-8."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Embedding(TOKENS + 1, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        count = words.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(count, dtype=self.head.weight.dtype)
        hidden = self.words(words) + self.places.weight[:count]
        logits: torch.Tensor = self.head(self.norm(self.layers(hidden, mask=mask, is_causal=True)))
        return logits


def loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    logits = model(words[:, :-1])[:, 1:]  # the first word has no two before it
    return F.cross_entropy(logits.flatten(0, 1).float(), words[:, 2:].flatten())


def trained(model: nn.Module, batches: list[torch.Tensor], precision: str) -> nn.Module:
    """Train a copy in fp32, in plain bf16 (rounded to nearest), or in bf16 with stochastic rounding."""
    model = copy.deepcopy(model)
    if precision != "fp32":
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    rounded = "pure-bf16" if precision == "stochastic" else None
    step = memfit.Step(model, optimizer, loss, scheduler=scheduler, precision=rounded)
    for batch in batches:
        step(batch)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    language = Language()
    torch.manual_seed(0)
    model, batches, held_out = Transformer(), [language.batch(BATCH) for _ in range(options.steps)], language.batch(256)
    losses: dict[str, float] = {}
    for precision in ("fp32", "nearest", "stochastic"):
        finished = trained(model, batches, precision).float()
        with torch.no_grad():
            losses[precision] = float(loss(finished, held_out))
        excess = losses[precision] / losses["fp32"] - 1
        print(f"{precision:>10}: held-out loss {losses[precision]:.4f}, {excess:+.2%} against fp32", flush=True)
    uniform = math.log(SYMBOLS)
    print(f"entropy of the language about {entropy(language, held_out):.4f}, of no knowledge {uniform:.4f}")
    if options.results is not None:
        write_atomically(options.results, json.dumps({"steps": options.steps, "losses": losses}, indent=1))


def entropy(language: Language, words: torch.Tensor) -> float:
    """The loss of who knows the chances."""
    chances = language.chances[words[:, :-2], words[:, 1:-1]]
    return float(-chances.gather(-1, words[:, 2:].unsqueeze(-1)).log().mean())


if __name__ == "__main__":
    main()
