"""How a level changes its parameters: by its optimizer at once, or with less memory by the techniques of a step.

Note [Inside a level]
    An update inside the backward pass uses a gradient before the others exist. So the level's gradient must be complete
    when its own backward pass has it: nothing is added from levels below, nothing averaged over ranks, and no
    hook looks at all gradients first.
"""

from typing import TYPE_CHECKING

from memfit.errors import InvalidInput
from memfit.step.policy import StepPolicy
from memfit.step.updater import Updater

if TYPE_CHECKING:
    from memfit.multilevel.problems import Problem


def make_updater(problem: "Problem") -> Updater | None:
    """What changes the parameters in the optimizer's place, if the level's settings ask for it."""
    policy = problem.config.step_policy
    if policy.state_tier is None and policy.update == "after":
        return None
    _check(problem, policy)
    assert problem.optimizer is not None
    return Updater(problem.module, problem.optimizer, policy, problem.torch_device, seed=0)


def check_gradient_is_complete(problem: "Problem") -> None:
    """See Note [Inside a level]; asked when the engine knows who depends on whom."""
    if not problem.updates_inside:
        return
    route = problem.engine.routes[problem]
    if route.sources:
        names = ", ".join(repr(source.name) for source in route.sources)
        raise InvalidInput(
            f'Config(update="inside") of the problem {problem.name!r} would use gradients before those through {names} '
            'have arrived; use update="after" for levels above others'
        )
    if problem.engine.ranks.several:
        raise InvalidInput(
            f'Config(update="inside") of the problem {problem.name!r} would use gradients before they are averaged '
            'over all processes; use update="after" with distributed=True'
        )


def _check(problem: "Problem", policy: StepPolicy) -> None:
    asked = 'update="inside"' if policy.update == "inside" else f"state_tier={policy.state_tier!r}"
    if problem.optimizer is None or problem.is_implemented("update"):
        raise InvalidInput(
            f"Config({asked}) of the problem {problem.name!r} is about its optimizer's step, but it changes its "
            "parameters by other means; leave it out"
        )
    if policy.update == "inside" and problem.is_implemented("grad_callback"):
        raise InvalidInput(
            f"grad_callback of the problem {problem.name!r} sees all gradients together, which an update inside the "
            'backward pass never has; use update="after", or leave the hook out'
        )
    if policy.state_tier and (problem.method == "unrolled" or problem.engine.config.roll_back):
        raise InvalidInput(
            f"Config({asked}) of the problem {problem.name!r}: its steps are gone through again from copies of the "
            "optimizer's state, which would be in memory after all; keep the state beside the parameters"
        )
