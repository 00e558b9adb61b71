"""What running by a captured program costs where operators are small: a 12-layer Transformer with a step of 10 ms.

    python -m benchmarks.overhead              # medians of interleaved steps, on one thread and on all

Eager kernels, nothing recomputed (a round trip), and the smallest budget; gradients are the same bits.
"""

import copy
import statistics
import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import memfit

LAYERS = 12
WIDTH, HEADS, ROWS, LENGTH = 48, 4, 2, 16
PAIRS = 400
LIMIT = 1.06  # of the eager step, for the round trip


class Tower(nn.Module):
    """Transformer layers and a head, as small as they are when nothing but overhead matters."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)
        ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.layers(states)).square().mean()
        return loss


def main() -> None:
    threads = torch.get_num_threads()
    table = Table(title="A 12-layer Transformer of small operators", title_justify="left")
    for heading in ("threads", "eager step", "round trip", "smallest budget"):
        table.add_column(heading, justify="right")
    ratios = []
    for count in dict.fromkeys((1, threads)):
        torch.set_num_threads(count)
        eager, batch = _made()
        trip = memfit.fit(copy.deepcopy(eager), batch)
        eager_s, ratio = _compared(eager, trip, batch)
        smallest = memfit.fit(copy.deepcopy(eager), batch, "smallest", time_limit=3)
        table.add_row(
            str(count), f"{1e3 * eager_s:.1f} ms", f"{ratio:.3f}", f"{_compared(eager, smallest, batch)[1]:.3f}"
        )
        ratios.append(ratio)
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    sys.exit(0 if max(ratios) <= LIMIT else f"missed: the round trip takes up to {max(ratios):.3f}, at most {LIMIT}")


def _made() -> tuple[Tower, torch.Tensor]:
    torch.manual_seed(0)
    return Tower(), torch.randn(ROWS, LENGTH, WIDTH)


def _compared(eager: nn.Module, other: nn.Module, batch: torch.Tensor) -> tuple[float, float]:
    """Seconds of an eager step, and the ratio of the other's to it: medians over pairs in both orders."""
    _check_equal(eager, other, batch)
    eager_s: list[float] = []
    ratios: list[float] = []
    for pair in range(PAIRS):
        taken = {id(model): _seconds(model, batch) for model in ((eager, other) if pair % 2 else (other, eager))}
        eager_s.append(taken[id(eager)])
        ratios.append(taken[id(other)] / eager_s[-1])
    return statistics.median(eager_s), statistics.median(ratios)


def _check_equal(eager: nn.Module, other: nn.Module, batch: torch.Tensor) -> None:
    for model in (eager, other):
        for _ in range(20):  # both are warm afterwards
            _seconds(model, batch)
    for one, two in zip(eager.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad)


def _seconds(model: nn.Module, batch: torch.Tensor) -> float:
    model.zero_grad()
    start = time.perf_counter()
    model(batch).backward()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
