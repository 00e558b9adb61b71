import copy
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.segments import Run, checkpointed, find_runs, segment_sizes, segments
from memfit.measure.peak import measure_peak


class Skipping(nn.Module):
    """A chain, a skip connection around `inner`, a chain with a mask, and a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.inner = nn.Linear(8, 8)
        self.twice = nn.Dropout(0.5)
        self.masked = nn.ModuleList(Masked() for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.twice(x + self.inner(x))
        mask = torch.ones(8)
        for layer in self.masked:
            x = layer(x, mask=mask)
        return self.head(self.twice(self.norm(x)))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x * mask).relu()


def names(model: nn.Module, runs: list[Run]) -> list[list[str]]:
    name_of = {module: name for name, module in model.named_modules()}
    return [["+".join(name_of[link.module] for link in block) for block in run] for run in runs]


def loss_of(model: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: model(x).square().sum()


def test_runs_end_at_skips_and_at_modules_called_twice() -> None:
    model = Skipping()
    assert names(model, find_runs(model, loss_of(model, torch.randn(4, 8)))) == [
        ["stem.0+stem.1+stem.2", "stem.3"],
        ["inner"],
        ["masked.0", "masked.1", "masked.2+norm"],
        ["head"],
    ]


def test_a_module_with_most_of_the_parameters_is_looked_into() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Skipping(), nn.Linear(2, 2))
    runs = names(model, find_runs(model, loss_of(model, torch.randn(4, 8))))
    assert runs[0] == ["0", "1.stem.0+1.stem.1+1.stem.2", "1.stem.3"]
    assert runs[-1] == ["1.head", "2"]


def test_segments_are_cut_within_runs_and_the_last_stays_plain() -> None:
    model = Skipping()
    runs = find_runs(model, loss_of(model, torch.randn(4, 8)))
    assert segment_sizes(runs) == [1, 2]
    assert [len(segment) for segment in segments(runs, 2)] == [4, 1, 2, 2]
    assert segments(runs[-1:], 2) == []


def test_a_checkpointed_model_has_the_loss_and_gradients_of_the_plain_one() -> None:
    plain, x = Skipping(), torch.randn(4, 8)
    changed = copy.deepcopy(plain)
    runs = find_runs(changed, loss_of(changed, x))
    for size in (1, 2, 3):
        ends = []
        with checkpointed(segments(runs, size)):
            for model in (plain, changed):
                model.zero_grad()
                torch.manual_seed(0)
                loss = loss_of(model, x)()
                loss.backward()
                ends.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
        assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
        assert not any("forward" in vars(module) for module in changed.modules())


def test_segments_need_less_memory() -> None:
    model = nn.Sequential(*(layer for _ in range(9) for layer in (nn.Linear(64, 64), nn.Tanh())))
    x = torch.randn(512, 64)
    runs = find_runs(model, loss_of(model, x))

    def peak_bytes() -> int:
        model.zero_grad()
        return measure_peak(lambda: loss_of(model, x)().backward(), resident=[model, x]).peak_bytes

    plain_bytes = peak_bytes()
    with checkpointed(segments(runs, 3)):
        assert peak_bytes() < 0.8 * plain_bytes
