"""Run steps of a model on a sample and leave nothing behind.

Note [Starts of gradients]
    A model that returns its loss is differentiated from it, as in training. A model that returns something
    else is differentiated from all of it, with fixed random numbers in the place of the loss's gradients.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memfit.capture.outputs import differentiated, take_apart
from memfit.capture.sample import Sample
from memfit.capture.snapshot import Snapshot


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Everything a step makes, by name."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    generator: dict[str, torch.Tensor]


@contextlib.contextmanager
def nothing_remains(model: nn.Module) -> Iterator[None]:
    """Put buffers, gradients, attributes and generators back."""
    devices = sorted({tensor.device.index for tensor in model.parameters() if tensor.is_cuda})
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    snapshot = Snapshot(model)
    with torch.random.fork_rng(devices):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            snapshot.restore()
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            for parameter, gradient in gradients:
                parameter.grad = gradient


def step(model: nn.Module, sample: Sample, *, seed: int, backward_from: str = "auto") -> list[torch.Tensor]:
    """Forward and backward; the outputs that gradients started from."""
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(seed)
    tensors, _ = take_apart(model(*sample.args, **sample.kwargs))
    starts = [tensors[index] for index in differentiated(tensors, backward_from)]
    del tensors
    torch.autograd.backward(starts, [_tangent(start, seed) for start in starts])
    return [start.detach() for start in starts]


def result_of(model: nn.Module, sample: Sample, *, seed: int, backward_from: str = "auto") -> Result:
    """Run a step from a seed and keep what it makes; the model is put back."""
    with nothing_remains(model):
        outputs = step(model, sample, seed=seed, backward_from=backward_from)
        return Result(
            outputs={f"output {number}": output.clone() for number, output in enumerate(outputs)},
            gradients={
                name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
            },
            buffers={name: buffer.detach().clone() for name, buffer in model.named_buffers()},
            generator={"generator": torch.get_rng_state()},
        )


def _tangent(start: torch.Tensor, seed: int) -> torch.Tensor:
    """See Note [Starts of gradients]."""
    if start.dim() == 0:
        return torch.ones_like(start)
    generator = torch.Generator(device=start.device).manual_seed(seed)
    return torch.randn(start.shape, generator=generator, device=start.device, dtype=torch.float32).to(start.dtype)


def leaf_gradients(sample: Sample) -> list[Any]:
    """Tensors of the sample that collect gradients themselves."""
    return [tensor for tensor in sample.tensors() if tensor.requires_grad]
