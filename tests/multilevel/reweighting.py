"""A small data-reweighting program: a classifier, and a network that weighs its samples."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memfit.multilevel import Config, Engine, EngineConfig, ImplicitProblem

CLASSES = 3


class Classifier(ImplicitProblem):
    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        losses = F.cross_entropy(self(inputs), labels, reduction="none")
        weights = self.reweight(losses.detach().to(self.reweight.module[0].weight.dtype).unsqueeze(1)).squeeze(1)
        return (weights * losses).mean()


class Reweight(ImplicitProblem):
    def training_step(self, batch: Any) -> dict[str, torch.Tensor]:
        inputs, labels = batch
        scores = self.classifier(inputs)
        return {"loss": F.cross_entropy(scores, labels), "accuracy": (scores.argmax(1) == labels).float().mean()}


def data(count: int, seed: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    inputs = torch.randn(count, 6, generator=generator) + F.one_hot(labels, 6)
    return TensorDataset(inputs.to(dtype), labels)


def classifier_network(*, dropout: float = 0.0, norm: bool = False) -> nn.Module:
    middle: list[nn.Module] = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(6, 16), *middle, nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, CLASSES))


def reweighting(
    *,
    lower: Config | None = None,
    upper: Config | None = None,
    engine: EngineConfig | None = None,
    batch_size: int = 8,
    shuffle: bool = False,
    dropout: float = 0.0,
    norm: bool = False,
    dtype: torch.dtype = torch.float32,
    make_optimizer: Any = None,
    make_scheduler: Any = None,
    engine_class: type[Engine] = Engine,
) -> Engine:
    """The whole program, the same every time."""
    torch.manual_seed(3)
    network = classifier_network(dropout=dropout, norm=norm).to(dtype)
    weigher = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid()).to(dtype)
    optimizer = (make_optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)))(network.parameters())
    classifier = Classifier(
        "classifier",
        lower or Config(),
        network,
        optimizer,
        make_scheduler(optimizer) if make_scheduler else None,
        DataLoader(data(64, 1, dtype), batch_size=batch_size, shuffle=shuffle),
    )
    reweight = Reweight(
        "reweight",
        upper or Config(),
        weigher,
        torch.optim.Adam(weigher.parameters(), lr=0.01),
        None,
        DataLoader(data(32, 2, dtype), batch_size=batch_size, shuffle=shuffle),
    )
    return engine_class(
        [reweight, classifier],
        engine or EngineConfig(train_iters=4, valid_step=10**9),
        {"u2l": {reweight: [classifier]}, "l2u": {classifier: [reweight]}},
    )


def parameters_of(engine: Engine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for problem in engine.problems for parameter in problem.parameters()]


def run(engine: Engine, steps: int = 4) -> list[torch.Tensor]:
    engine.train()
    for _ in range(steps):
        engine.train_step()
    return parameters_of(engine)


def largest_difference(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in zip(left, right, strict=True))


def all_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@contextlib.contextmanager
def generator_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
