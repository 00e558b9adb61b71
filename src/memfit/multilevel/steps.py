"""One step of one problem: its own gradient, the hypergradient, the change of the parameters."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from memfit.errors import InvalidInput
from memfit.multilevel.change import change_parameters
from memfit.multilevel.dependencies import Route
from memfit.multilevel.hypergradient import METHODS
from memfit.multilevel.hypergradient.curvature import check_depends
from memfit.multilevel.hypergradient.method import Pull
from memfit.multilevel.hypergradient.unrolled import kept_every
from memfit.multilevel.records import Snapshot, StepRecord, generator_states, settings_of, shares_of
from memfit.multilevel.vectors import Vector, add_scaled, or_zeros

if TYPE_CHECKING:
    from memfit.multilevel.problems import Problem

Metrics = dict[str, Any]
Vectors = dict["Problem", Vector]


def make_step(problem: "Problem", batches: Sequence[Any] | None = None) -> Metrics:
    """One optimizer step over all its micro-batches; metrics are those of the last, the loss is that of all."""
    problem.record = None  # its batches make room for the new ones
    drawn = (
        [problem.get_batch() for _ in range(problem.config.gradient_accumulation)] if batches is None else [*batches]
    )
    record = StepRecord(batches=drawn, shares=shares_of(drawn))
    if problem.optimizer is not None:
        record.settings = settings_of(problem.optimizer)
    if _keeps_start(problem):
        record.before = Snapshot(problem)
    loss, metrics = set_gradients(problem, record)

    def again() -> float:
        return float(set_gradients(problem, record)[0])

    record.applied = change_parameters(problem, closure=again if _asks_again(problem) else None)
    if problem.mixed.scaler is not None:
        problem.mixed.scaler.update(overflowed=not record.applied)
    if problem.engine.is_differentiated(problem):
        problem.record = record
        if problem.method == "unrolled":
            problem.trajectory.append(record)
    return {"loss": loss, **metrics}


def set_gradients(problem: "Problem", record: StepRecord) -> tuple[torch.Tensor, Metrics]:
    """Leave the whole gradient of a problem's loss in its parameters, averaged over ranks."""
    route = problem.engine.routes[problem]
    loss, metrics = _backward(problem, record, route.sources)
    found = [parameter.grad for parameter in problem.parameter_list]
    vectors = {source: _taken(source, problem) for source in route.sources}
    scale = problem.mixed.scale
    if scale != 1:
        found = [None if part is None else part.div_(scale) for part in found]
        vectors = {source: [part.div_(scale) for part in vector] for source, vector in vectors.items()}
    if route.legs:
        for vector in vectors.values():
            problem.engine.ranks.average(vector)
        hypergradient = brought_home(route, vectors, loss)
        found = [b if a is None else a.add_(b) for a, b in zip(found, hypergradient, strict=True)]
    found = problem.engine.ranks.averaged(found, problem.parameter_list)
    for parameter, gradient in zip(problem.parameter_list, found, strict=True):
        parameter.grad = gradient
    return loss, metrics


def brought_home(route: Route, vectors: Vectors, loss: torch.Tensor) -> Vector:
    """The hypergradient: gradients at lower solutions, taken along the route to the upper parameters."""
    going_down, going_up = dict(vectors), dict(vectors)  # by phase, see Note [Routes]
    home: list[torch.Tensor | None] = [None] * len(route.upper.parameter_list)
    for leg in route.legs:
        vector = (going_down if leg.downwards else going_up).pop(leg.through)
        pull = Pull(lower=leg.through, vector=vector, onto=leg.onto, upper=route.upper, loss=loss)
        with torch.no_grad():
            arrived = METHODS[leg.through.method].pull(pull)
        del pull, vector
        for problem, gradients in arrived.items():
            if problem is route.upper:
                home = [b if a is None else a + b for a, b in zip(home, gradients, strict=True)]
                continue
            problem.engine.ranks.average(gradients)
            for phase in (going_down, going_up) if leg.downwards else (going_up,):
                phase[problem] = add_scaled(phase[problem], gradients) if problem in phase else gradients
    return or_zeros(home, route.upper.parameter_list)


def _backward(problem: "Problem", record: StepRecord, sources: Sequence["Problem"]) -> tuple[torch.Tensor, Metrics]:
    """Accumulate the gradients of all micro-batches by the problem's and the sources' parameters."""
    choosers = problem.uppers if problem.method == "reinforce" else ()
    problem.engine.openness.only(problem, *sources, *choosers)
    inputs = [parameter for each in (problem, *sources) for parameter in each.parameter_list]
    for parameter in inputs:
        parameter.grad = None
    total: torch.Tensor | None = None
    metrics: Metrics = {}
    record.generators = []
    if problem.updater is not None and not problem.count:
        problem.updater.allocate(problem.parameter_list)
    for number, (batch, share) in enumerate(zip(record.batches, record.shares, strict=True), 1):
        if not problem.engine.is_rehearsing:
            record.generators.append(generator_states(problem.torch_device))
        loss, metrics = problem.loss_of(batch)
        factor = share * problem.mixed.scale
        _backward_from(problem, loss if factor == 1 else loss * factor, inputs, is_last=number == len(record.batches))
        _add_score(problem, metrics)
        # A copy: what reduces inside torch may return a number in the storage of the whole tensor.
        part = loss.detach().clone() if share == 1 else loss.detach() * share
        total = part if total is None else total + part
    assert total is not None
    return total, {key: _detached(value) for key, value in metrics.items() if key != "log_prob"}


def _backward_from(problem: "Problem", loss: torch.Tensor, inputs: list[torch.nn.Parameter], *, is_last: bool) -> None:
    if problem.method == "reinforce" and not (inputs and loss.requires_grad):
        return  # it chooses; nothing of it is differentiated
    if not loss.requires_grad:
        names = " or ".join(repr(each.name) for each in (problem, *problem.lowers))
        raise InvalidInput(
            f"the loss of the problem {problem.name!r} depends on no parameter of {names}; compute it from their "
            "modules without detach or no_grad"
        )
    if problem.updater is None:
        loss.backward(inputs=inputs)
    else:
        with problem.updater.around_backward(loss, inputs, is_last=is_last):
            loss.backward(inputs=inputs)
    if problem.updates_inside:
        return  # gradients are gone
    if not problem.config.allow_unused and any(parameter.grad is None for parameter in problem.parameter_list):
        raise InvalidInput(
            f"the loss of the problem {problem.name!r} does not use all its parameters and allow_unused=False says it "
            "should; freeze the others, or set allow_unused=True"
        )


def _add_score(problem: "Problem", metrics: Metrics) -> None:
    """Where the method is `reinforce`: add the gradient of the log-probability of this step's choices."""
    log_prob = metrics.get("log_prob")
    if problem.method != "reinforce" or log_prob is None:
        return
    for upper in problem.uppers:
        found = torch.autograd.grad(log_prob.sum(), upper.parameter_list, retain_graph=True, allow_unused=True)
        if any(part is not None for part in found):
            score = or_zeros(found, upper.parameter_list)
            problem.score[upper] = add_scaled(problem.score[upper], score) if upper in problem.score else score


def _taken(source: "Problem", upper: "Problem") -> Vector:
    """The gradient that arrived at a lower solution, out of its parameters."""
    gradients = [parameter.grad for parameter in source.parameter_list]
    if source.method != "reinforce":
        check_depends(upper, source, gradients)
    for parameter in source.parameter_list:
        parameter.grad = None
    return or_zeros(gradients, source.parameter_list)


def _keeps_start(problem: "Problem") -> bool:
    return (
        problem.method == "unrolled"
        and problem.is_second_order
        and problem.engine.is_differentiated(problem)
        and len(problem.trajectory) % kept_every(problem) == 0
    )


def _asks_again(problem: "Problem") -> bool:
    return isinstance(problem.optimizer, torch.optim.LBFGS)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
