"""One micro-batch of a step, captured with its loss: what it takes by itself and as a part of every kind of step.

Note [The whole peak]
    Beside what the captured pass shows there are live: the rest of the batch, the optimizer's state, and, if there
    are several micro-batches, the gradients of the earlier ones, which the later ones are added to. The peak
    is in a later pass (see Note [Gone at once] in `hand_over.py`) or in the update after the last one.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from memfit.capture.sample import Sample
from memfit.capture.trace import Joint
from memfit.capture.with_loss import WithLoss
from memfit.errors import InvalidFile
from memfit.ir import Graph, Kind, Program
from memfit.measure.peak import held_bytes
from memfit.pipeline import make_planner, with_times_within
from memfit.plan.identity import identity_program
from memfit.plan.simulate import simulate
from memfit.plan.solve import Planner
from memfit.plan.validate import check_program
from memfit.prepare import Prepared, prepare, traced_for
from memfit.recipe import Budget, Recipe, budget_bytes, is_fraction
from memfit.runner import check_equal_to_eager
from memfit.step.hand_over import added_early, peak_with_updates, with_gradients_held, without_gradients_held
from memfit.step.policy import StepPolicy
from memfit.step.precision import autocast
from memfit.step.update_cost import UpdateCost

_SCALAR_BYTES = 16  # the loss of a piece, the number its backward starts with, whether it is finite


class Piece:
    """A captured micro-batch, priced for every policy that cuts batches into such pieces."""

    def __init__(
        self, subject: WithLoss, sample: Sample, prepared: Prepared, recipe: Recipe, other_batch_bytes: int
    ) -> None:
        self.subject = subject
        self.sample = sample
        self.prepared = prepared
        self.recipe = recipe
        self._other_batch_bytes = other_batch_bytes  # of the batch, beyond what the capture counts

    @classmethod
    def captured(
        cls,
        subject: WithLoss,
        piece: Any,
        everything: list[Any],
        recipe: Recipe,
        precision: str | None,
        budget: Budget = None,
        external_bytes: int = 0,
    ) -> "Piece":
        """Capture a piece with its loss and measure its operators, inside the budget.

        `everything` is the batch and all its pieces, `external_bytes` what lives beside it and the model.
        """
        sample = Sample((piece,))
        device = next(subject.parameters()).device
        with autocast(precision, device.type), traced_for(subject, sample, recipe) as joint:
            check_equal_to_eager(type(subject.model).__name__, joint, warn=False)
            first = prepare(subject, joint, sample, recipe, limit_bytes=_limit_bytes(budget, external_bytes, None))
            limit_bytes = _limit_bytes(budget, external_bytes, first.unplanned_peak_bytes)
            prepared = _with_times(subject, joint, sample, first, recipe, limit_bytes)
        storages = [prepared.graph.storages[each] for each in prepared.graph.resident]
        counted_bytes = sum(each.size_bytes for each in storages if each.kind is Kind.BATCH)
        return cls(subject, sample, prepared, recipe, held_bytes(everything) - counted_bytes)

    @property
    def own_us(self) -> float:
        """What one piece takes as it is."""
        unplanned_us = self.prepared.unplanned_step_us
        return self.planner(released=False).problem.own_time_us if unplanned_us is None else unplanned_us

    @property
    def least_us(self) -> float:
        """What one piece takes at the least, whatever the plan: all that can be is done in place."""
        problem = self.planner(released=False).problem
        return problem.own_time_us - problem.gain_in_place_us

    @functools.cached_property
    def gradient_bytes(self) -> int:
        graph = self.prepared.graph
        return sum(graph.storages[each].size_bytes for each in {gradient for _, gradient in graph.trained})

    def are_timed(self, program: Program | None) -> bool:
        """Whether steps have shown what everything takes that a program runs; without one, the unplanned step."""
        return self.prepared.are_timed(program or identity_program(self.prepared.graph))

    def planner(self, *, released: bool) -> Planner:
        """A planner of one pass, in which gradients stay to the end or are gone at once."""
        return self._released_planner if released else self._held_planner

    @functools.cached_property
    def _held_planner(self) -> Planner:
        return make_planner(self.subject, self.prepared, self.recipe)

    @functools.cached_property
    def _released_planner(self) -> Planner:
        released = dataclasses.replace(self.prepared, graph=without_gradients_held(self.prepared.graph))
        return make_planner(self.subject, released, self.recipe)

    def beside_bytes(self, policy: StepPolicy, update: UpdateCost) -> int:
        """Live during every pass and not seen by its capture, see Note [The whole peak]."""
        earlier_bytes = self.gradient_bytes if policy.micro_batches * policy.accumulate > 1 else 0
        carried_bytes = update.carried_bytes if policy.update == "inside" else 0
        scalar_bytes = _SCALAR_BYTES * (2 + policy.micro_batches)
        return self._other_batch_bytes + update.state_bytes + earlier_bytes + carried_bytes + scalar_bytes

    def end_bytes(self, policy: StepPolicy, update: UpdateCost) -> int:
        """Live during an update that follows the last pass."""
        if policy.update == "inside":
            return 0
        update_bytes = update.state_bytes + update.workspace_bytes + _SCALAR_BYTES * (2 + policy.micro_batches)
        return self.prepared.persistent_bytes + self._other_batch_bytes + update_bytes

    def least_bytes(self, policy: StepPolicy, update: UpdateCost) -> int:
        """What smaller pieces need at the least, however small: all but activations."""
        several = dataclasses.replace(policy, micro_batches=2)
        graph = self.prepared.graph
        resident_bytes = sum(graph.storages[each].size_bytes for each in graph.resident)
        return max(resident_bytes + self.beside_bytes(several, update), self.end_bytes(several, update))

    def eager_peak_bytes(self, policy: StepPolicy, update: UpdateCost) -> int:
        """Of the whole step, unplanned."""
        graph, workspaces = self.prepared.eager, self.prepared.eager_workspace_bytes
        return self._peak_bytes(graph, identity_program(graph), workspaces, policy, update)

    def planned_peak_bytes(self, program: Program, policy: StepPolicy, update: UpdateCost) -> int:
        """Of the whole step with a program that `runnable` gave."""
        graph, workspaces = self.prepared.graph, self.prepared.costs.workspace_bytes
        if is_released(policy):
            program = added_early(graph, program)
        return self._peak_bytes(graph, program, workspaces, policy, update)

    def runnable(self, program: Program) -> Program | None:
        """A planner's program as the captured call runs it; None if it cannot."""
        held = with_gradients_held(self.prepared.graph, program)
        try:
            check_program(self.prepared.graph, held)
        except InvalidFile:
            return None
        return held

    def _peak_bytes(
        self, graph: Graph, program: Program, workspaces: Sequence[int], policy: StepPolicy, update: UpdateCost
    ) -> int:
        granularity_bytes = self.prepared.granularity_bytes
        if is_released(policy):
            workspace_bytes = max(0, update.workspace_bytes - update.carried_bytes)  # what is carried is used there
            update_bytes = workspace_bytes if policy.update == "inside" else 0
            pass_bytes = peak_with_updates(
                graph, program, workspaces, update_bytes=update_bytes, granularity_bytes=granularity_bytes
            )
        else:
            pass_bytes = simulate(
                graph, program, workspace_bytes=workspaces, granularity_bytes=granularity_bytes
            ).peak_bytes
        return max(pass_bytes + self.beside_bytes(policy, update), self.end_bytes(policy, update))


def _limit_bytes(budget: Budget, external_bytes: int, peak_bytes: int | None) -> int | None:
    """Return what a piece may take of a budget; None if that is not known."""
    if budget is None or (peak_bytes is None and is_fraction(budget)):
        return None
    return max(0, budget_bytes(budget, (peak_bytes or 0) + external_bytes) - external_bytes)


def _with_times(
    subject: WithLoss, joint: Joint, sample: Sample, prepared: Prepared, recipe: Recipe, limit_bytes: int | None
) -> Prepared:
    """Time operators inside the limit, in steps that drop each gradient when it is made.

    Gradients held to the end may be over a budget that updates inside the backward pass keep to.
    """
    released = dataclasses.replace(prepared, graph=without_gradients_held(prepared.graph))
    timed = with_times_within(subject, joint, sample, released, recipe, limit_bytes)
    return dataclasses.replace(timed, graph=prepared.graph)


def is_released(policy: StepPolicy) -> bool:
    """Whether gradients are gone at once in the pass that has the peak."""
    return policy.update == "inside" or policy.micro_batches * policy.accumulate > 1
