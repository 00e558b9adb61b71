"""From a description to a module and its batches."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from generated import layers_attention, layers_images, layers_indexing, layers_pointwise, layers_sequences
from generated import layers_structure as _structure
from generated.layer import LAYERS, Stream
from generated.specs import LayerSpec, ModelSpec

VOCABULARY = 32
MOST_ELEMENTS = 2**17  # of what flows between two layers
FAMILIES = (layers_attention, layers_images, layers_indexing, layers_pointwise, layers_sequences, _structure)


class Invalid(Exception):
    """Layers that do not fit each other: no model."""


def stream_of(spec: ModelSpec) -> Stream:
    """What the first layer takes."""
    batch, channels, size = spec.batch, spec.channels, spec.size
    if spec.domain in ("rows", "bags"):
        return Stream("rows", (batch, channels))
    if spec.domain in ("sequence", "tokens"):
        return Stream("sequence", (batch, size, channels))
    axes = {"signal": 1, "image": 2, "volume": 3}[spec.domain]
    return Stream(spec.domain, (batch, channels, *[size] * axes))


def chain(specs: tuple[LayerSpec, ...], stream: Stream) -> tuple[nn.Sequential, Stream]:
    """Layers one behind the other, and what the last one makes."""
    layers = nn.Sequential()
    for spec in specs:
        kind = LAYERS[spec.kind]
        if stream.domain not in kind.takes:
            raise Invalid(f"{spec.kind} takes no {stream.domain}")
        options = dict(spec.options)
        domain = kind.makes or stream.domain
        if kind.holds_layers:
            options["inner"], inside = chain(spec.inner, stream)
            domain = inside.domain
        made = kind(stream, **options)
        layers.append(made)
        stream = Stream(domain, _made_shape(made, stream))
    return layers, stream


def _made_shape(layer: nn.Module, stream: Stream) -> tuple[int, ...]:
    """What a layer makes is seen by running it; its buffers and the generator stay as they are."""
    with torch.no_grad(), torch.random.fork_rng():
        shape = tuple(layer.eval()(torch.full(stream.shape, 0.5)).shape)
    layer.train()
    numel = torch.Size(shape).numel()
    if not 0 < numel <= MOST_ELEMENTS:
        raise Invalid(f"{numel} elements between two layers")
    return shape


class GeneratedModel(nn.Module):
    """Embeds its batch if that is tokens, runs its layers, and returns what the description says."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.inputs, self.outputs = spec.inputs, spec.outputs
        stream = stream_of(spec)
        self.embedding: nn.Module | None = None
        if spec.domain == "tokens":
            self.embedding = nn.Embedding(VOCABULARY, spec.channels)
        elif spec.domain == "bags":
            self.embedding = nn.EmbeddingBag(VOCABULARY, spec.channels, mode="mean")
        self.extra = nn.Linear(4, stream.channels) if spec.inputs in ("pair", "keywords") else None
        self.axis = stream.channel_axis
        self.body, self.stream = chain(spec.layers, stream)
        self.shift = None
        if not any(parameter.requires_grad for parameter in self.parameters()):
            self.shift = nn.Parameter(torch.zeros(stream.channels))
        self.tied = spec.tied and spec.domain == "tokens" and self.stream.channels == spec.channels
        self.tied = self.tied and self.stream.domain == "sequence"

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None, scale: float | None = None) -> Any:
        x = x if self.embedding is None else self.embedding(x)
        if self.extra is not None:
            added = self.extra(extra)
            x = x + added.view(added.shape[0], *([1] * (x.dim() - 2)), -1).movedim(-1, self.axis)
        if self.shift is not None:
            x = x + self.shift.view(-1, *([1] * (x.dim() - 1 - self.axis)))
        y = self.body(x if scale is None else x * scale)
        if self.tied:
            assert self.embedding is not None
            y = F.linear(y, self.embedding.weight.to(y.dtype))
        return self._returned(y)

    def _returned(self, y: torch.Tensor) -> Any:
        if self.outputs == "tuple":
            return y, y.mean(), None
        if self.outputs == "nested":
            return {"logits": y, "more": [y.detach().amax(), None, (y.square().mean(),)], "name": "states"}
        if self.outputs == "loss":
            return y.float().square().mean()
        if self.outputs == "loss and more":
            return {"loss": y.float().square().mean(), "logits": y}
        return y


def build(spec: ModelSpec) -> GeneratedModel:
    """The module with weights from torch's generator."""
    try:
        model = GeneratedModel(spec)
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        raise Invalid(str(error)) from error
    model = model.to(getattr(torch, spec.dtype))
    return model.to(memory_format=torch.channels_last) if is_channels_last(spec) else model


def is_channels_last(spec: ModelSpec) -> bool:
    return spec.channels_last and spec.domain == "image"


def make_batch(spec: ModelSpec, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one call."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, spec.dtype)
    if spec.domain in ("tokens", "bags"):
        x = torch.randint(VOCABULARY, (spec.batch, spec.size), generator=generator)
    else:
        x = torch.randn(stream_of(spec).shape, generator=generator).to(dtype)
    if is_channels_last(spec):
        x = x.contiguous(memory_format=torch.channels_last)
    extra = torch.randn(spec.batch, 4, generator=generator).to(dtype)
    if spec.inputs == "pair":
        return (x, extra), {}
    if spec.inputs == "keywords":
        return (), {"x": x, "extra": extra, "scale": 0.5}
    return (x, None) if spec.inputs == "none" else (x,), {}
