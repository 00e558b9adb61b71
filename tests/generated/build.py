"""From a description to a module and its batches."""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from generated import (
    layers_algebra,
    layers_architectures,
    layers_attention,
    layers_blocks,
    layers_forms,
    layers_functions,
    layers_images,
    layers_indexing,
    layers_lookup,
    layers_losses,
    layers_pointwise,
    layers_recurrent,
    layers_sequences,
    layers_structure,
    layers_weights,
)
from generated.layer import LAYERS, Stream
from generated.specs import LayerSpec, ModelSpec

VOCABULARY = 32
MOST_ELEMENTS = 2**17  # of what flows between two layers, and as many times that of the batch as below
MOST_GROWTH = 4
INPUTS = ("tensor", "pair", "keywords", "none", "leaf", "list", "dict", "dataclass", "flags", "twice", "NaN")
OUTPUTS = (
    "tensor",
    "tuple",
    "nested",
    "loss",
    "loss and more",
    "dataclass",
    "named tuple",
    "two",
    "same twice",
    "codes",
)
OUTPUTS += ("view", "parameter", "input too")
NO_STEP = ("detached", "input", "frozen")  # what a model may return that nothing can be trained by
FAMILIES = (
    layers_architectures,
    *(layers_algebra, layers_attention, layers_blocks, layers_forms, layers_functions, layers_images),
    *(layers_indexing, layers_lookup, layers_losses, layers_pointwise, layers_recurrent, layers_sequences),
    *(layers_structure, layers_weights),
)


class Invalid(Exception):
    """Layers that do not fit each other: no model."""


@dataclasses.dataclass
class Given:
    """A batch as a record."""

    x: torch.Tensor
    extra: torch.Tensor | None = None


@dataclasses.dataclass
class Found:
    """Outputs as a record."""

    states: torch.Tensor
    more: torch.Tensor | None = None


class Named(NamedTuple):
    states: torch.Tensor
    size: torch.Tensor


def stream_of(spec: ModelSpec) -> Stream:
    """What the first layer takes."""
    batch, channels, size = spec.batch, spec.channels, spec.size
    if spec.domain in ("rows", "bags"):
        return Stream("rows", (batch, channels))
    if spec.domain in ("sequence", "tokens"):
        return Stream("sequence", (batch, size, channels))
    axes = {"signal": 1, "image": 2, "volume": 3}[spec.domain]
    return Stream(spec.domain, (batch, channels, *[size] * axes))


def chain(specs: tuple[LayerSpec, ...], stream: Stream, most: int = MOST_ELEMENTS) -> tuple[nn.Sequential, Stream]:
    """Layers one behind the other, and what the last one makes."""
    layers = nn.Sequential()
    for spec in specs:
        kind = LAYERS[spec.kind]
        if stream.domain not in kind.takes:
            raise Invalid(f"{spec.kind} takes no {stream.domain}")
        options = dict(spec.options)
        domain = kind.makes or stream.domain
        if kind.holds_layers:
            options["inner"], inside = chain(spec.inner, stream, most)
            domain = inside.domain
        made = kind(stream, **options)
        layers.append(made)
        stream = Stream(domain, _made_shape(made, stream, most))
    return layers, stream


def _made_shape(layer: nn.Module, stream: Stream, most: int) -> tuple[int, ...]:
    """What a layer makes is seen by running it; its buffers and the generator stay as they are."""
    with torch.no_grad(), torch.random.fork_rng():
        shape = tuple(layer.eval()(torch.full(stream.shape, 0.5)).shape)
    layer.train()
    numel = torch.Size(shape).numel()
    if not 0 < numel <= most:
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
        with_extra = ("pair", "keywords", "list", "dict", "dataclass")
        self.extra = nn.Linear(4, stream.channels) if spec.inputs in with_extra else None
        self.axis = stream.channel_axis
        most = max(MOST_ELEMENTS, MOST_GROWTH * torch.Size(stream.shape).numel())
        self.body, self.stream = chain(spec.layers, stream, most)
        self.shift = None
        if self.outputs == "frozen":
            self.requires_grad_(False)
        elif not any(parameter.requires_grad for parameter in self.parameters()):
            self.shift = nn.Parameter(torch.zeros(stream.channels))
        self.tied = spec.tied and spec.domain == "tokens" and self.stream.channels == spec.channels
        self.tied = self.tied and self.stream.domain == "sequence"

    def forward(
        self,
        x: Any,
        extra: torch.Tensor | None = None,
        scale: float | None = None,
        *,
        twice: bool = False,
        how: str | None = None,
    ) -> Any:
        if isinstance(x, list | dict | Given):
            x, extra = (x.x, x.extra) if isinstance(x, Given) else x.values() if isinstance(x, dict) else x
        given, also = x, extra if self.extra is None else None
        x = x if self.embedding is None else self.embedding(x)
        if self.extra is not None:
            added = self.extra(extra)
            x = x + added.view(added.shape[0], *([1] * (x.dim() - 2)), -1).movedim(-1, self.axis)
        if self.shift is not None:
            x = x + self.shift.view(-1, *([1] * (x.dim() - 1 - self.axis)))
        if how == "with the same" and also is not None and self.embedding is None:
            x = x + also.tanh()
        y = self.body(x if scale is None else x * scale)
        y = y * 2 if twice else y
        if self.tied:
            assert self.embedding is not None
            y = F.linear(y, self.embedding.weight.to(y.dtype))
        return given if self.outputs == "input" else (y, given) if self.outputs == "input too" else self._returned(y)

    def _returned(self, y: torch.Tensor) -> Any:
        if self.outputs in ("dataclass", "named tuple"):
            return Found(y, y.sum(-1)) if self.outputs == "dataclass" else Named(y, y.detach().norm())
        if self.outputs in ("two", "same twice"):
            return [y, y.tanh().mean(0)] if self.outputs == "two" else (y, y)
        if self.outputs == "codes":
            return y, y.argmax(-1), y.shape[0], "codes"
        if self.outputs == "view":
            return y.transpose(0, -1), y[:1]
        if self.outputs == "parameter":
            return y, next(self.parameters())
        if self.outputs == "detached":
            return y.detach()
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
    model = model if spec.dtype == "float32" else model.to(getattr(torch, spec.dtype))
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
    if spec.inputs == "leaf" and x.is_floating_point():
        x.requires_grad_()
    if spec.inputs == "NaN" and x.is_floating_point():
        x.view(-1)[:1] = float("nan") if x.is_contiguous() else 0.0
    extra = torch.randn(spec.batch, 4, generator=generator).to(dtype)
    if spec.inputs == "pair":
        return (x, extra), {}
    if spec.inputs == "keywords":
        return (), {"x": x, "extra": extra, "scale": 0.5}
    if spec.inputs == "flags":
        return (x,), {"twice": True, "how": "with none"}
    if spec.inputs == "twice":
        return (x, x), {"how": "with the same"}
    gathered = {"list": [x, extra], "dict": {"x": x, "extra": extra}, "dataclass": Given(x, extra)}
    if spec.inputs in gathered:
        return (gathered[spec.inputs],), {}
    return (x, None) if spec.inputs == "none" else (x,), {}
