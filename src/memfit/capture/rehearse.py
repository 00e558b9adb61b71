"""Run steps of a model on a sample and leave nothing behind.

Note [Starts of gradients]
    A model that returns its loss is differentiated from it, as in training. A model that returns something
    else is differentiated from all of it, with fixed random numbers in the place of the loss's gradients. As
    those of a loss they appear when the backward pass starts, and nobody holds them: what is handed to
    `torch.autograd.backward` would live to its end.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from memfit.accelerator import accelerators_of, generator_states, generators_kept
from memfit.capture.autocast import autocast, autocast_state, drop_casts
from memfit.capture.hooks import run_without_hooks
from memfit.capture.outputs import differentiated, take_apart, without_gradient
from memfit.capture.sample import Sample, with_others
from memfit.capture.state import Keep, State, copied
from memfit.errors import CaptureError

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Everything a step makes, by name."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    generator: dict[str, torch.Tensor]


@contextlib.contextmanager
def nothing_remains(model: nn.Module, sample: Sample, *, keep: Keep = copied) -> Iterator[None]:
    """Put back all that can be reached, and gradients and generators; `keep` remembers what buffers hold.

    Hooks of the user's do nothing meanwhile, see Note [Hooks run as often as in eager] in `hooks.py`.
    """
    devices = accelerators_of([*model.parameters(), *model.buffers(), *sample.tensors()])
    gradients = [(leaf, leaf.grad) for leaf in _leaves(model, sample).values()]
    state = State(model, sample, keep=keep)
    marks = [(each, dict(each.__dict__)) for each in (*model.parameters(), *model.buffers(), *sample.tensors())]
    wanted = [(each, each.requires_grad) for each in sample.tensors()]
    with generators_kept(devices), run_without_hooks(model, sample.tensors()):
        try:
            drop_gradients(model, sample)
            yield
        finally:
            for leaf, gradient in gradients:
                leaf.grad = gradient
            for each, attributes in marks:
                if each.__dict__ != attributes:
                    each.__dict__.clear()
                    each.__dict__.update(attributes)
            for each, wants in wanted:
                if each.is_leaf and each.requires_grad != wants:
                    each.requires_grad_(wants)
            state.restore()


def drop_gradients(model: nn.Module, sample: Sample) -> None:
    """What `zero_grad` does, for tensors of the sample too."""
    for leaf in _leaves(model, sample).values():
        leaf.grad = None


def seed_all(seed: int) -> None:
    """Seed torch's generator; those of Python and NumPy stay as they are for 0, from which all but few steps begin."""
    torch.manual_seed(seed)
    if seed:
        random.seed(seed)
        np.random.seed(seed)


def step(
    model: nn.Module,
    sample: Sample,
    *,
    seed: int,
    backward_from: str = "auto",
    before_backward: Callable[[], None] | None = None,
    holds_output: bool = True,
) -> list[torch.Tensor]:
    """Forward and backward; the outputs that gradients started from.

    What the model returned is held to the end, see Note [What a step is] in `plan/simulate.py`, if it is wanted.
    """
    drop_gradients(model, sample)
    seed_all(seed)
    given = with_others(sample.args, sample.kwargs)  # lists may be written
    outputs = [model(*given.args, **given.kwargs)]
    held = outputs[0] if holds_output else None
    starts = differentiate(outputs, seed=seed, backward_from=backward_from, before_backward=before_backward)
    del held
    return starts


def differentiate(
    outputs: list[Any],
    *,
    seed: int,
    backward_from: str = "auto",
    before_backward: Callable[[], None] | None = None,
) -> list[torch.Tensor]:
    """The backward pass from what a forward returned, the one item of a list, which is emptied: nobody holds it."""
    drop_casts()
    tensors, _ = take_apart(outputs.pop())
    starts = [tensors[index] for index in differentiated(tensors, backward_from)]
    del tensors
    _check_starts(starts)
    loss = starts[0] if len(starts) == 1 and starts[0].dim() == 0 else _Loss.apply(seed, *starts)
    if before_backward is not None:
        before_backward()
    with autocast(autocast_state(), enabled=False):
        loss.backward()
    return [start.detach() for start in starts]


def _check_starts(starts: list[torch.Tensor]) -> None:
    """Refuse outputs that no backward pass can start from."""
    if not starts:
        raise without_gradient("the model")
    if sparse := [str(each.layout) for each in starts if each.layout is not torch.strided]:
        raise CaptureError(f"an output is sparse ({sparse[0]}), of which nothing is planned; return output.to_dense()")


def with_results(
    model: nn.Module,
    sample: Sample,
    use: Callable[[Result], _T],
    *,
    seed: int,
    backward_from: str = "auto",
    keep: Keep = copied,
) -> _T:
    """Run a step from a seed and use what it makes while that is there; the model is put back."""
    with nothing_remains(model, sample, keep=keep):
        outputs = step(model, sample, seed=seed, backward_from=backward_from, holds_output=False)
        return use(
            Result(
                outputs={f"output {number}": output for number, output in enumerate(outputs)},
                gradients={name: leaf.grad for name, leaf in _leaves(model, sample).items() if leaf.grad is not None},
                buffers=_buffers(model),
                generator=_generators(model, sample),
            )
        )


def forward_with_results(
    model: nn.Module,
    sample: Sample,
    use: Callable[[Result], _T],
    *,
    seed: int,
    backward_from: str = "auto",
    keep: Keep = copied,
) -> _T:
    """Run the forward pass of a step alone, recorded by autograd as in a step; gradients are none."""
    with nothing_remains(model, sample, keep=keep):
        torch.manual_seed(seed)
        given = with_others(sample.args, sample.kwargs)
        tensors, _ = take_apart(model(*given.args, **given.kwargs))
        starts = [tensors[index].detach() for index in differentiated(tensors, backward_from)]
        del tensors
        return use(
            Result(
                outputs={f"output {number}": output for number, output in enumerate(starts)},
                gradients={},
                buffers=_buffers(model),
                generator=_generators(model, sample),
            )
        )


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach() for name, buffer in model.named_buffers()}


def _generators(model: nn.Module, sample: Sample) -> dict[str, torch.Tensor]:
    """Where generators stand, of every device that the step may have drawn on."""
    devices = accelerators_of([*model.parameters(), *model.buffers(), *sample.tensors()])
    states = generator_states(devices)
    return {"generator" if name == "cpu" else f"generator of {name}": state for name, state in states.items()}


class _Loss(torch.autograd.Function):
    """Stands in for the loss of a model that has none, see Note [Starts of gradients]."""

    @staticmethod
    def forward(ctx: Any, seed: int, *starts: torch.Tensor) -> torch.Tensor:
        ctx.seed = seed
        ctx.kinds = [(start.shape, start.dtype, start.device) for start in starts]
        return starts[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        return None, *(_tangent(ctx.seed, *kind) for kind in ctx.kinds)


def _tangent(seed: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def _leaves(model: nn.Module, sample: Sample) -> dict[str, torch.Tensor]:
    """What collects gradients, by name: parameters, and tensors of the sample that want one."""
    given = {f"sample {n}": each for n, each in enumerate(sample.tensors()) if each.requires_grad and each.is_leaf}
    return dict(model.named_parameters()) | given
