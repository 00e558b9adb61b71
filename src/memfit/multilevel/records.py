"""What is remembered of a step, so that those above can go through it again.

Note [Going through again]
    A hypergradient evaluates losses of a lower step again: same micro-batches, same random numbers. Nothing of
    that may be seen afterwards: generators are put back, and modules get copies of their buffers meanwhile
    (not overwritten ones: a graph may still need the values it saw).
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit import accelerator
from memfit.tensors import tensors_in

if TYPE_CHECKING:
    from memfit.multilevel.problems import Problem


@dataclasses.dataclass(kw_only=True)
class StepRecord:
    """The micro-batches of a step, their shares in the loss, and the random numbers they met."""

    batches: list[Any]
    shares: list[float]
    generators: list[dict[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    settings: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # of the optimizer's groups
    before: "Snapshot | None" = None  # kept where the step itself is differentiated
    applied: bool = True  # False: the scaler found an overflow and left the parameters alone


def shares_of(batches: Sequence[Any]) -> list[float]:
    """What part of the whole batch each micro-batch is, by its number of samples where it has one."""
    sizes = [next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()), None) for batch in batches]
    known = [size for size in sizes if size]
    if len(known) < len(sizes):
        return [1 / len(batches)] * len(batches)
    return [size / sum(known) for size in known]


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """States of the generators that random operators of a problem draw from."""
    return accelerator.generator_states([accelerator.indexed(device)] if accelerator.is_accelerator(device) else [])


@contextlib.contextmanager
def gone_through_again(problem: "Problem", record: StepRecord, number: int) -> Iterator[None]:
    """See Note [Going through again]; `number` is that of the micro-batch."""
    now = {} if problem.engine.is_rehearsing else generator_states(problem.torch_device)
    if now:
        accelerator.set_generator_states(record.generators[number])
    with copied_buffers(each.module for each in problem.engine.problems):
        try:
            yield
        finally:
            if now:
                accelerator.set_generator_states(now)


@contextlib.contextmanager
def copied_buffers(modules: Iterator[nn.Module]) -> Iterator[None]:
    """Modules work on copies of their buffers for a while."""
    places = {
        id(part): (part, dict(part._buffers))
        for module in modules
        for part in module.modules()
        if any(buffer is not None for buffer in part._buffers.values())
    }
    for part, buffers in places.values():
        for name, buffer in buffers.items():
            part._buffers[name] = None if buffer is None else buffer.detach().clone()
    try:
        yield
    finally:
        for part, buffers in places.values():
            part._buffers.update(buffers)


class Snapshot:
    """Parameters, buffers and optimizer of a problem at one moment."""

    def __init__(self, problem: "Problem") -> None:
        self.parameters = [parameter.detach().clone() for parameter in problem.parameter_list]
        self.buffers = [buffer.detach().clone() for buffer in problem.module.buffers()]
        self.groups: list[dict[str, Any]] = []
        self.state: dict[torch.Tensor, dict[str, Any]] = {}
        if problem.optimizer is not None:
            self.groups = settings_of(problem.optimizer)
            self.state = {
                parameter: {key: _copied(value) for key, value in state.items()}
                for parameter, state in problem.optimizer.state.items()
            }

    @torch.no_grad()
    def restore(self, problem: "Problem") -> None:
        own = (*problem.parameter_list, *problem.module.buffers())
        for tensor, kept in zip(own, (*self.parameters, *self.buffers), strict=True):
            tensor.copy_(kept)
        if problem.optimizer is not None:
            for group, settings in zip(problem.optimizer.param_groups, self.groups, strict=True):
                group.update(settings)
            problem.optimizer.state.clear()
            for parameter, state in self.state.items():
                problem.optimizer.state[parameter] = {key: _copied(value) for key, value in state.items()}


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Learning rates and other settings of an optimizer's groups, as they are now."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def placed(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give parameters other values for a while; their own memory is not written, so they come back exactly."""
    own = [parameter.data for parameter in parameters]
    try:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
        yield
    finally:
        for parameter, value in zip(parameters, own, strict=True):
            parameter.data = value
