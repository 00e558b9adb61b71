"""A memory budget for a level: its module is planned where its derivatives are first-order.

Note [Budgets of levels]
    A planned module computes first derivatives. Whether a level's module is ever differentiated twice follows from
    the methods: its own, if a level above differentiates through it, and those of the problems below whose loss
    uses it. Where it is first-order only, `budget=` makes a plan for the module, on the arguments of its first
    call. Where it is not, the level is run by one micro-batch and one step at a time instead: products with the
    curvature keep no graph between them, and steps are differentiated one after the other.
"""

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memfit.accelerator import set_generator_states
from memfit.api import fit
from memfit.capture.sample import Sample
from memfit.errors import InvalidInput
from memfit.multilevel.records import copied_buffers, generator_states

if TYPE_CHECKING:
    from memfit.multilevel.engine import Engine
    from memfit.multilevel.problems import Problem

log = logging.getLogger("memfit.multilevel")


def plan_levels(engine: "Engine") -> None:
    """Plan the modules of all levels that have a budget and allow it. See Note [Budgets of levels]."""
    for problem in engine.problems:
        if problem.config.budget is None:
            continue
        reason = twice_differentiated_by(problem)
        if reason:
            log.info(
                "%s: the budget is kept by checkpoints of steps, not by a plan, since its module is differentiated "
                "twice (%s); the budget itself is not enforced",
                problem.name,
                reason,
            )
            continue
        sample = _first_call(problem)
        progress = False if problem.engine.config.progress else None  # its bar is on the terminal already
        fit(problem.module, sample, problem.config.budget, optimizer=problem.optimizer, progress=progress)
        log.info("%s: the module runs by a plan for %s", problem.name, problem.config.budget)


def twice_differentiated_by(problem: "Problem") -> str:
    """The method and problem that differentiate gradients of this module; empty if none does."""
    engine = problem.engine
    users = [problem, *(each for each in engine.problems if problem in (*each.uppers, *each.lowers))]
    for user in users:
        if engine.is_differentiated(user) and user.is_second_order:
            return f"method {user.method!r} of {user.name!r}"
    return ""


class _Called(BaseException):
    """Not an Exception, so that no training_step catches it."""


def _first_call(problem: "Problem") -> Sample:
    """The arguments of the first call that a training step makes of the module; nothing is computed or changed."""
    calls: list[Sample] = []

    def stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Sample(args, kwargs))
        raise _Called

    kept = generator_states(problem.torch_device)
    batch = problem.peek()
    handle = problem.module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with copied_buffers(each.module for each in problem.engine.problems), torch.enable_grad():
            problem.loss_of(batch)
    except _Called:
        return calls[0]
    finally:
        handle.remove()
        set_generator_states(kept)
    raise InvalidInput(
        f"the problem {problem.name!r} has a budget, but its training_step does not call its module; leave the budget "
        "out, or call self.module (or self) on the batch"
    )
