"""The standard cases: nine well-known models at sizes whose step takes 0.2 to 3 s on two cores.

Every case is one training step as people write it: build the model, make a batch, compute a
loss. Each has two batch sizes; the frontier has one of its own.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from memfit.zoo.unet import UNet

VOCABULARY = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its batch and its loss."""

    name: str
    batch_size: int
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]  # batch size -> what the loss takes
    loss: Callable[[nn.Module, Any], torch.Tensor]
    sample: Callable[[Any], Any]  # the part of a batch that the model's forward takes
    outputs: str | None = None  # the only one of the model's named outputs that the step uses

    def __str__(self) -> str:
        return f"{self.name} x{self.batch_size}"


def standard_cases() -> list[Case]:
    """All nine models at both batch sizes."""
    return [make(size) for make, sizes in _STANDARD_SIZES for size in sizes]


def named_cases(names: Iterable[str], words: Sequence[str] = ()) -> list[Case]:
    """The standard cases of some names, all or those whose name contains one of the words."""
    cases = {str(case): case for case in standard_cases()}
    return [cases[name] for name in names if not words or any(word.lower() in name.lower() for word in words)]


def frontier_cases() -> list[Case]:
    """The nine models, each at a size at which a good part of the peak is activations."""
    return [
        _resnet50(16),
        _googlenet(16),
        _mobilenet(16),
        _vgg16(8),
        _vit(4),
        _unet(2),
        _gpt2(4),
        _bert(8),
        _lstm(32, with_loss=True),
    ]


def small_cases() -> list[Case]:
    """A few of them, small enough for the fast tests."""
    return [
        _vision("resnet18", "resnet18", 32, 2),
        _gpt2(1, tokens=32, layers=2),
        _lstm(2, tokens=16),
    ]


def rank_cases() -> list[Case]:
    """Two of them at sizes of which several ranks fit side by side."""
    return [_vision("ResNet-50", "resnet50", 96, 16), _gpt2(4, layers=4)]


def _resnet50(batch_size: int) -> Case:
    return _vision("ResNet-50", "resnet50", 128, batch_size)


def _googlenet(batch_size: int) -> Case:
    return _vision("GoogLeNet", "googlenet", 160, batch_size, aux_logits=False, init_weights=False)


def _mobilenet(batch_size: int) -> Case:
    return _vision("MobileNetV2", "mobilenet_v2", 160, batch_size)


def _vgg16(batch_size: int) -> Case:
    return _vision("VGG-16", "vgg16", 128, batch_size)


def _vit(batch_size: int) -> Case:
    return _vision("ViT-B/16", "vit_b_16", 224, batch_size)


def _vision(name: str, model: str, pixels: int, batch_size: int, **options: Any) -> Case:
    def make_model() -> nn.Module:
        import torchvision

        built: nn.Module = getattr(torchvision.models, model)(**options)
        return built

    return Case(
        name=name,
        batch_size=batch_size,
        make_model=make_model,
        make_batch=lambda size: (torch.randn(size, 3, pixels, pixels), torch.randint(1000, (size,))),
        loss=lambda module, batch: F.cross_entropy(module(batch[0]), batch[1]),
        sample=lambda batch: (batch[0],),
    )


def _unet(batch_size: int) -> Case:
    pixels, classes = 192, 2
    return Case(
        name="UNet",
        batch_size=batch_size,
        make_model=lambda: UNet(3, classes),
        make_batch=lambda size: (
            torch.randn(size, 3, pixels, pixels),
            torch.randint(classes, (size, pixels, pixels)),
        ),
        loss=lambda module, batch: F.cross_entropy(module(batch[0]), batch[1]),
        sample=lambda batch: (batch[0],),
    )


def _gpt2(batch_size: int, *, tokens: int = 128, layers: int = 12) -> Case:
    def make_model() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        model: nn.Module = GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False)).train()
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]
        return model

    return _language_case("GPT-2", batch_size, make_model, tokens, 50257)


def _bert(batch_size: int, *, tokens: int = 128) -> Case:
    def make_model() -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        model: nn.Module = BertForMaskedLM(BertConfig()).train()
        return model

    return _language_case("BERT", batch_size, make_model, tokens, 30522)


def _language_case(
    name: str, batch_size: int, make_model: Callable[[], nn.Module], tokens: int, vocabulary: int
) -> Case:
    def make_batch(size: int) -> dict[str, torch.Tensor]:
        words = torch.randint(vocabulary, (size, tokens))
        return {"input_ids": words, "labels": words.clone()}

    return Case(
        name=name,
        batch_size=batch_size,
        make_model=make_model,
        make_batch=make_batch,
        loss=lambda module, batch: module(**batch).loss,
        sample=lambda batch: batch,
        outputs="loss",
    )


def _lstm(batch_size: int, *, tokens: int = 64, with_loss: bool = False) -> Case:
    def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(VOCABULARY, (size, tokens)), torch.randint(VOCABULARY, (size, tokens))

    if with_loss:
        return Case(
            name="LSTM",
            batch_size=batch_size,
            make_model=LSTMWithLoss,
            make_batch=make_batch,
            loss=lambda module, batch: module(*batch),
            sample=lambda batch: batch,
        )
    return Case(
        name="LSTM",
        batch_size=batch_size,
        make_model=LSTMLanguageModel,
        make_batch=make_batch,
        loss=lambda module, batch: F.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten()),
        sample=lambda batch: (batch[0],),
    )


_STANDARD_SIZES: tuple[tuple[Callable[[int], Case], tuple[int, int]], ...] = (
    (_resnet50, (4, 8)),
    (_googlenet, (8, 16)),
    (_mobilenet, (8, 16)),
    (_vgg16, (2, 4)),
    (_vit, (1, 2)),
    (_unet, (1, 2)),
    (_gpt2, (1, 2)),
    (_bert, (2, 4)),
    (_lstm, (16, 32)),
)


class LSTMLanguageModel(nn.Module):
    """Two layers of LSTM with dropout, as in the classic word-level language models."""

    def __init__(self, width: int = 650) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.dropout = nn.Dropout(0.5)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.5, batch_first=True)
        self.decoder = nn.Linear(width, VOCABULARY)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.dropout(self.embedding(words)))
        logits: torch.Tensor = self.decoder(self.dropout(states))
        return logits


class LSTMWithLoss(LSTMLanguageModel):
    """The same, returning its loss: three buffers as big as the logits belong to the loss, too much to leave out."""

    def forward(self, words: torch.Tensor, next_words: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(words).flatten(0, 1), next_words.flatten())
