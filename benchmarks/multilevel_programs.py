"""The programs of the multilevel benchmark: a residual MLP with learned weights, and the reweighting of ResNet-50."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from memfit.multilevel import Config, Engine, EngineConfig, ImplicitProblem

SAMPLES, WIDTH, LAYERS, UNROLLED = 2048, 128, 8, 8
CLASSES = 10


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def residual_mlp() -> nn.Module:
    return nn.Sequential(*(ResidualBlock() for _ in range(LAYERS)))


def weigher() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())


def regression_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)


def weighted_regression(network: Any, weights: Any, batch: Any) -> torch.Tensor:
    """The lower loss: a mean over samples, each with its learned weight."""
    losses = F.mse_loss(network(batch[0]), batch[1], reduction="none").mean(1, keepdim=True)
    weighted: torch.Tensor = (weights(losses.detach()) * losses).mean()
    return weighted


class Regression(ImplicitProblem):
    def training_step(self, batch: Any) -> torch.Tensor:
        return weighted_regression(self, self.weights, batch)  # type: ignore[attr-defined]


class Weights(ImplicitProblem):
    def training_step(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self.regression(batch[0]), batch[1])  # type: ignore[attr-defined]


def regression_program(config: Config) -> Engine:
    """The residual MLP, the same every time."""
    torch.manual_seed(0)
    network, weights_net, batches = residual_mlp(), weigher(), [regression_batch()]
    descent = torch.optim.SGD(network.parameters(), lr=0.01)
    regression = Regression("regression", config, network, descent, None, batches)
    weights = Weights("weights", None, weights_net, torch.optim.Adam(weights_net.parameters()), None, batches)
    return Engine(
        [weights, regression],
        EngineConfig(),
        {"u2l": {weights: [regression]}, "l2u": {regression: [weights]}},
    )


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers(images) + self.shortcut(images))


def resnet50() -> nn.Module:
    """ResNet-50 for images of 32 pixels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(channels, width, stride if number == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class Images:
    """Batches of images of 32 pixels, each made anew."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size

    def __iter__(self) -> Any:
        while True:
            yield torch.randn(self._batch_size, 3, 32, 32), torch.randint(CLASSES, (self._batch_size,))


class Classifier(ImplicitProblem):
    def training_step(self, batch: Any) -> torch.Tensor:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none").unsqueeze(1)
        weights = self.reweight(losses.detach().float())  # type: ignore[attr-defined]
        weighted: torch.Tensor = (weights * losses).mean()
        return weighted


class Reweight(ImplicitProblem):
    def training_step(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.classifier(batch[0]), batch[1])  # type: ignore[attr-defined]


def reweighting_program(lower: Config, upper: Config, *, batch_size: int, distributed: bool = False) -> Engine:
    """The reweighting of ResNet-50, the same every time."""
    torch.manual_seed(0)
    network, weights = resnet50(), weigher()
    descent = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    classifier = Classifier("classifier", lower, network, descent, None, Images(batch_size))
    reweight = Reweight("reweight", upper, weights, torch.optim.Adam(weights.parameters()), None, Images(batch_size))
    return Engine(
        [reweight, classifier],
        EngineConfig(distributed=distributed),
        {"u2l": {reweight: [classifier]}, "l2u": {classifier: [reweight]}},
    )
