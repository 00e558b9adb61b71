"""Backwards through one update of the parameters: clipping, then the optimizer's step.

The step is made by torch's own optimizer in its differentiable form, on copies, with the settings and the state
that the real step had; so every optimizer that torch can differentiate is covered, several groups included.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from memfit.errors import InvalidInput
from memfit.multilevel.records import Snapshot
from memfit.multilevel.vectors import Vector
from memfit.optimizer_twin import empty_twin

if TYPE_CHECKING:
    from memfit.multilevel.problems import Problem

Optional = list[torch.Tensor | None]
StateKey = tuple[int, str]  # number of the parameter, name of the entry


@dataclasses.dataclass(kw_only=True)
class Adjoint:
    """Derivatives of the upper loss by what a step leaves behind."""

    parameters: Vector
    state: dict[StateKey, torch.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class Pulled:
    """Derivatives by what a step started from."""

    before: Adjoint
    gradient: Optional
    onto: Optional  # by the parameters of other problems that the update itself uses


def pulled_through_update(
    lower: "Problem", before: Snapshot, gradient: Optional, after: Adjoint, onto: Sequence[torch.Tensor]
) -> Pulled:
    """Pull an adjoint back through the update that a gradient made."""
    parameters = [value.detach().requires_grad_() for value in before.parameters]
    gradients = [None if part is None else part.detach().requires_grad_() for part in gradient]
    state = {
        (number, key): value.detach().clone().requires_grad_()
        for number, parameter in enumerate(lower.parameter_list)
        for key, value in before.state.get(parameter, {}).items()
        if _is_differentiable(key, value)
    }
    with torch.enable_grad():
        changed, changed_state = _updated(lower, before, parameters, clipped(gradients, lower), state)
    outputs = [*changed, *(changed_state[key] for key in after.state if key in changed_state)]
    weights = [*after.parameters, *(weight for key, weight in after.state.items() if key in changed_state)]
    pairs = [(output, weight) for output, weight in zip(outputs, weights, strict=True) if output.requires_grad]
    sources = [*parameters, *state.values(), *(part for part in gradients if part is not None), *onto]
    found = iter(
        torch.autograd.grad(
            [output for output, _ in pairs], sources, [weight for _, weight in pairs], allow_unused=True
        )
    )
    by_parameters = [_or_zeros(next(found), value) for value in parameters]
    by_state = {key: _or_zeros(next(found), value) for key, value in state.items()}
    by_gradient = [None if part is None else next(found) for part in gradients]
    return Pulled(before=Adjoint(parameters=by_parameters, state=by_state), gradient=by_gradient, onto=list(found))


def clipped(gradients: Optional, lower: "Problem") -> Optional:
    """Gradients no longer than the problem allows, in a form that can be differentiated."""
    longest = lower.config.gradient_clipping
    present = [part for part in gradients if part is not None]
    if not longest or not present:
        return gradients
    length = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in present]))
    factor = (longest / (length + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
    return [None if part is None else part * factor for part in gradients]


def _updated(
    lower: "Problem",
    before: Snapshot,
    parameters: list[torch.Tensor],
    gradients: Optional,
    state: dict[StateKey, torch.Tensor],
) -> tuple[list[torch.Tensor], dict[StateKey, torch.Tensor]]:
    """Parameters and state after the update, differentiable by all that is given."""
    update = getattr(lower, "update", None)
    if update is not None:
        whole = [torch.zeros_like(b) if a is None else a for a, b in zip(gradients, parameters, strict=True)]
        return list(update(parameters, whole)), {}
    assert lower.optimizer is not None
    stand_ins = [parameter.clone() for parameter in parameters]
    numbers = {id(parameter): number for number, parameter in enumerate(lower.parameter_list)}
    twin = _differentiable_twin(lower, lower.optimizer)
    for group, settings in zip(lower.optimizer.param_groups, before.groups, strict=True):
        for parameter in group["params"]:
            number = numbers.get(id(parameter))
            if number is None or gradients[number] is None:
                continue
            stand_in = stand_ins[number]
            stand_in.grad = gradients[number]
            twin.state[stand_in] = {
                key: state[number, key].clone() if (number, key) in state else _constant(key, value)
                for key, value in before.state.get(parameter, {}).items()
            }
            twin.param_groups.append(_differentiable_group(settings, stand_in, twin))
    twin.step()
    changed = {
        (number, key): value
        for number, stand_in in enumerate(stand_ins)
        for key, value in twin.state.get(stand_in, {}).items()
        if _is_differentiable(key, value)
    }
    return stand_ins, changed


def _differentiable_twin(lower: "Problem", optimizer: Optimizer) -> Optimizer:
    if "differentiable" not in optimizer.defaults:
        raise InvalidInput(
            f"the optimizer {type(optimizer).__name__} of the problem {lower.name!r} cannot be differentiated, which "
            f"the method {lower.method!r} needs; use SGD, Adam, AdamW or another that has differentiable=, or a "
            'method that does not look at the optimizer ("darts", "cg", "neumann", "nystrom")'
        )
    twin = empty_twin(optimizer)
    twin.defaults = {**optimizer.defaults, "differentiable": True}
    return twin


def _differentiable_group(settings: dict[str, Any], stand_in: torch.Tensor, twin: Optimizer) -> dict[str, Any]:
    """Each parameter is a group of its own, since one may be at its first step and another not."""
    group = {**settings, "params": [stand_in], "differentiable": True}
    group.update({key: False for key in ("foreach", "fused", "capturable") if key in group})
    if isinstance(twin, torch.optim.SGD) and group["momentum"] and not _has_buffer(twin, stand_in):
        # torch detaches the first buffer; from zeros and undamped, the same value comes out with its derivative.
        twin.state[stand_in]["momentum_buffer"] = torch.zeros_like(stand_in)
        group["dampening"] = 0
    return group


def _has_buffer(twin: Optimizer, stand_in: torch.Tensor) -> bool:
    return twin.state[stand_in].get("momentum_buffer") is not None


def _is_differentiable(key: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and key != "step"


def _constant(key: str, value: Any) -> Any:
    """A copy; step counts in fp64, since the real step computes with them as Python numbers."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(torch.float64, copy=True) if key == "step" else value.detach().clone()


def _or_zeros(found: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if found is None else found
