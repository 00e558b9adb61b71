"""Puts a saved state back: tensor by tensor, into what is there already."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from memfit.errors import InvalidFile, first_line
from memfit.step.checkpoint import Stored, value_of
from memfit.step.optimizers import parameters_of


def check_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Refuse the state of another model before anything is changed."""
    own = model.state_dict()
    missing, unknown = own.keys() - saved.keys(), saved.keys() - own.keys()
    if missing or unknown:
        raise InvalidFile(
            f"the checkpoint is of another model: {_some(missing)} missing in it, {_some(unknown)} unknown to this "
            f"{type(model).__name__}; build the model as it was"
        )
    for name, value in own.items():
        if isinstance(value, torch.Tensor) and value.shape != saved[name].shape:
            raise InvalidFile(
                f"the checkpoint is of another model: {name!r} has shape {tuple(saved[name].shape)} in it, "
                f"{tuple(value.shape)} here; build the model as it was"
            )


def restore_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Copy parameters and buffers into their places."""
    others = {}
    for name, place in model.state_dict().items():
        if isinstance(place, torch.Tensor):
            copy_into(place, saved[name])
        else:
            others[name] = value_of(saved[name])
    if others:
        model.load_state_dict(others, strict=False)


def restore_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], settle: Callable[[nn.Parameter], None]) -> None:
    """Give every parameter its state; `settle` takes each to where it belongs before the next is read."""
    groups: list[dict[str, Any]] = pytree.tree_map(value_of, saved["param_groups"])
    try:
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
    except ValueError as error:
        raise InvalidFile(f"the checkpoint is of another optimizer: {first_line(error)}; build it as it was") from error
    numbers = [number for group in groups for number in group["params"]]
    owners = [group for group in optimizer.param_groups for _ in group["params"]]
    for number, parameter, group in zip(numbers, parameters_of(optimizer), owners, strict=True):
        if number in saved["state"]:
            on_device = bool(group.get("capturable") or group.get("fused"))
            optimizer.state[parameter] = {
                name: _placed(value_of(value), parameter, on_device) for name, value in saved["state"][number].items()
            }
            settle(parameter)


def copy_into(place: torch.Tensor, found: Any) -> None:
    """Fill a tensor from a state."""
    if isinstance(found, Stored):
        found.copy_into(place)
    elif found is not place:
        place.detach().copy_(found)


def _placed(value: Any, parameter: nn.Parameter, on_device: bool) -> Any:
    """Counters stay on the host unless the optimizer wants them on the device, as torch itself does it."""
    if isinstance(value, torch.Tensor) and (value.dim() or on_device):
        return value.to(parameter.device)
    return value


def _some(names: Any) -> str:
    names = sorted(names)
    return f"{', '.join(names[:3])}{' and more are' if len(names) > 3 else ' is'}" if names else "nothing is"
