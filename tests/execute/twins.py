"""Models, batches and steps to compare a captured model with its eager twin."""

import copy
import dataclasses

import torch
from torch import nn

import memfit


class ConvNet(nn.Module):
    """BatchNorm, in-place ReLU, a residual, dropout, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, 5)

    def forward(self, image, scale=1.0):
        features = self.relu(self.bn1(self.conv1(image)))
        residual = self.conv2(features)
        residual += features
        features = self.relu(residual) * scale
        return self.head(self.dropout(nn.functional.max_pool2d(features, 2).mean((2, 3))))


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=0.4, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        states, _ = self.lstm(self.embedding(words))
        return self.head(self.dropout(states))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)

    def forward(self, tokens):
        return self.layer(tokens)


@dataclasses.dataclass
class Answer:
    loss: torch.Tensor
    logits: torch.Tensor
    name: str = "answer"


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, features):
        logits = self.linear(features)
        return Answer(loss=logits.square().mean(), logits=logits)


MODELS = {
    "conv": (ConvNet, lambda: torch.randn(4, 3, 8, 8)),
    "conv channels-last": (
        lambda: ConvNet().to(memory_format=torch.channels_last),
        lambda: torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last),
    ),
    "tied language model": (TiedLanguageModel, lambda: torch.randint(50, (3, 7))),
    "encoder": (Encoder, lambda: torch.randn(2, 5, 16)),
}


def train_step(model, batch, seed=3):
    """Loss, gradients, buffers and generator state after one forward and backward."""
    torch.manual_seed(seed)
    loss = model(batch).square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *gradients, *model.buffers(), torch.get_rng_state()]


def assert_same(ones, others):
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


class Linear(nn.Module):
    """A linear layer with something done around it."""

    def __init__(self, forward, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.written = forward

    def forward(self, features):
        return self.written(self, features)


def assert_captured_equals_eager(eager, sample, batch):
    """Capture on one batch, compare on another: nothing of the first may be baked in."""
    captured = memfit.fit(copy.deepcopy(eager), sample)
    assert_same(train_step(eager, batch), train_step(captured, batch))
    return captured
