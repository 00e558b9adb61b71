"""From complete gradients to changed parameters: clipping, hooks, the optimizer's step."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from memfit.multilevel.problems import Problem


def change_parameters(
    problem: "Problem",
    *,
    settings: Sequence[dict[str, Any]] = (),
    closure: Callable[[], float] | None = None,
) -> bool:
    """Change a problem's parameters by their gradients, which are gone then; False if they overflowed.

    `settings` of the optimizer's groups are taken over first; `closure` computes loss and gradients again, for
    optimizers that ask for it.
    """
    optimizer, scaler = problem.optimizer, problem.mixed.scaler
    if optimizer is not None:
        for group, kept in zip(optimizer.param_groups, settings, strict=False):
            group.update(kept)
    if problem.config.gradient_clipping:
        torch.nn.utils.clip_grad_norm_(problem.parameter_list, problem.config.gradient_clipping)
    problem.call_back("grad_callback")
    applied = not (scaler is not None and _overflowed(problem))
    if applied:
        _step(problem, closure)
        problem.call_back("param_callback")
    for parameter in problem.parameter_list:
        parameter.grad = None
    return applied


def _step(problem: "Problem", closure: Callable[[], float] | None) -> None:
    update = getattr(problem, "update", None)
    if problem.updater is not None:
        if problem.updates_inside:
            problem.updater.settle()  # it is done
        else:
            problem.updater.apply(problem.parameter_list)
    elif update is None:
        if problem.optimizer is not None:
            problem.optimizer.step(closure) if closure is not None else problem.optimizer.step()
    else:
        _updated_by_hand(problem, update)


def _updated_by_hand(problem: "Problem", update: Callable[..., Any]) -> None:
    with torch.no_grad():
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in problem.parameter_list]
        changed = list(update(list(problem.parameter_list), gradients))
        for parameter, value in zip(problem.parameter_list, changed, strict=True):
            parameter.copy_(value)


def _overflowed(problem: "Problem") -> bool:
    gradients = [parameter.grad for parameter in problem.parameter_list if parameter.grad is not None]
    return bool(gradients) and not bool(torch.stack([gradient.isfinite().all() for gradient in gradients]).all())
