"""Small models with a few megabytes of activations, to plan and to train."""

import dataclasses

import torch
from torch import nn

MIB = 2**20
BLOCKS = 4


class ConvNet(nn.Module):
    """Equal blocks with BatchNorm and ReLU, then dropout: 2.5 MiB of activations for a batch of 8."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.layers = nn.Sequential(*(_block(width) for _ in range(BLOCKS)))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.dropout(self.layers(self.stem(images)))
        logits: torch.Tensor = self.head(features.mean((2, 3)))
        return logits


def _block(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


class Perceptron(nn.Module):
    """Residual layers with dropout, whose masks lean operators keep in bits; returns its loss."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4))
        self.dropout = nn.Dropout(0.3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            features = features + self.dropout(layer(features))
        return features.square().mean()


@dataclasses.dataclass
class Answer:
    loss: torch.Tensor
    logits: torch.Tensor


class Answering(nn.Module):
    """Returns a loss beside its logits, which are bigger than anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 2000)

    def forward(self, features: torch.Tensor) -> Answer:
        logits = self.head(self.body(features))
        return Answer(loss=logits.square().mean(), logits=logits)


def images(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32)


def rows(count: int = 512) -> torch.Tensor:
    return torch.randn(count, 128)


def step(model: nn.Module, batch: torch.Tensor, seed: int = 3) -> list[torch.Tensor | None]:
    """Loss, gradients, buffers and the generator after one forward and backward."""
    torch.manual_seed(seed)
    loss = model(batch).square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *gradients, *model.buffers(), torch.get_rng_state()]


def state_of(model: nn.Module) -> list[torch.Tensor]:
    """Everything that a call which only looks must leave alone."""
    return [*(each.clone() for each in model.state_dict().values()), torch.get_rng_state()]


def assert_same(ones, others) -> None:
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def assert_untouched(model: nn.Module, before: list[torch.Tensor]) -> None:
    assert "forward" not in model.__dict__
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same(before, state_of(model))
