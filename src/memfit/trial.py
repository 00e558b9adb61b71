"""How long real steps of a model take in one way or another. They leave nothing behind.

Note [Nobody notices]
    Steps are run with other parameters and buffers that share the memory of the model's own: so gradients come to
    those, and hooks on parameters, which may count or wait for other ranks, are not called. The strides stay, for which
    kernels were compiled. Captured calls that write into parameters or arguments are not tried.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from memfit.accelerator import synchronize
from memfit.capture.rehearse import differentiate, nothing_remains
from memfit.capture.sample import Sample
from memfit.describe import device_of, is_fake
from memfit.errors import first_line
from memfit.execute.compiled import CompiledCall
from memfit.execute.handover import is_watched
from memfit.execute.kinds import states_of
from memfit.recipe import Recipe
from memfit.tensors import states_by_name
from memfit.trees import map_tensors

log = logging.getLogger(__name__)

_ROUNDS = 3  # the first of each warms up
_SECONDS = 3.0  # after which no third one is begun where the second has shown
_CLEAR = 0.05  # of the time: so far apart one step each is enough


def can_run_steps(model: nn.Module, sample: Sample, recipe: Recipe) -> bool:
    """Whether steps can be run that leave nothing behind, and speed is what is wished for."""
    hooks = (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks)
    updated = any(is_watched(each) for each in model.parameters())
    is_real = recipe.device is None and not is_fake(model, sample)
    return is_real and recipe.budget != "smallest" and not any(hooks) and not updated


def step_seconds(model: nn.Module, sample: Sample, recipe: Recipe) -> float:
    """Of one step, the way the model runs at the moment."""
    others, own = _sharing_memory(states_by_name(model)), _own_copy(sample)  # see Note [Nobody notices]
    torch.manual_seed(0)
    _wait_for(model)
    start = time.perf_counter()
    outputs = [functional_call(model, others, own.args, dict(own.kwargs))]
    differentiate(outputs, seed=0, backward_from=recipe.backward_from)
    _wait_for(model)
    return time.perf_counter() - start


def seconds_by_call(
    model: nn.Module, sample: Sample, recipe: Recipe, calls: Sequence[CompiledCall]
) -> list[float] | None:
    """What a step takes by each of some captured calls, of a few steps in turns; None if it cannot be seen."""
    if not can_run_steps(model, sample, recipe) or not all(call.changes_only_buffers for call in calls):
        return None
    seconds: list[list[float]] = [[] for _ in calls]
    with nothing_remains(model, sample), torch.enable_grad():
        end = time.monotonic() + _SECONDS
        for number in range(_ROUNDS):
            if number == _ROUNDS - 1 and time.monotonic() > end and _is_clear([seen[-1] for seen in seconds]):
                break
            for call, seen in list(zip(calls, seconds, strict=True))[:: (-1) ** number]:  # in both orders
                try:
                    seen.append(_call_seconds(call, model, sample, recipe))
                except Exception as error:
                    log.info("ways to run the step are not compared in steps: %s", first_line(error))
                    return None
    return [min(seen[1:]) for seen in seconds]


def _is_clear(seconds: Sequence[float]) -> bool:
    fastest, *others = sorted(seconds)
    return not others or others[0] - fastest > _CLEAR * fastest


def _call_seconds(call: CompiledCall, model: nn.Module, sample: Sample, recipe: Recipe) -> float:
    states, args, kwargs = _sharing_memory((states_of(model), sample.args, dict(sample.kwargs)))
    _wait_for(model)
    start = time.perf_counter()
    differentiate([call(states, args, kwargs)], seed=0, backward_from=recipe.backward_from)
    _wait_for(model)
    return time.perf_counter() - start


def _sharing_memory(tensors: Any) -> Any:
    """Others with the same memory; what is there twice is once more."""
    others: dict[int, torch.Tensor] = {}

    def other(tensor: torch.Tensor) -> torch.Tensor:
        return others.setdefault(id(tensor), tensor.detach().requires_grad_(tensor.requires_grad))

    return map_tensors(other, tensors)


def _wait_for(model: nn.Module) -> None:
    synchronize(device_of(model))


def _own_copy(sample: Sample) -> Sample:
    """Without the graph that led to it, and in memory of its own: a forward may write into what it is given."""
    copied: Any = map_tensors(
        lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad),
        (sample.args, dict(sample.kwargs)),
    )
    return Sample(*copied)
