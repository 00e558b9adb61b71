"""Choose how to run a training step: the least predicted time for a sample whose whole peak is within the budget.

    for every number of micro-batches, from few to many, and every precision:
        capture a piece with its loss, once
        price it as it is, with every way to update          (exact, no search)
        plan it for every way to update that could still win (a search each)

Note [What need not be tried]
    A plan takes at least as long as its operations do, each once and in place where that can be. What cannot win
    by that bound is not planned. Smaller pieces use a processor no better, so when pieces of one size cannot win,
    smaller ones are not captured.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memfit.alone import alone
from memfit.capture.sample import Sample
from memfit.capture.with_loss import WithLoss
from memfit.errors import InfeasibleBudget, InvalidInput
from memfit.execute.attach import check_unplanned
from memfit.measure.peak import held_bytes
from memfit.plan.expand import program_of
from memfit.plan.solve import Solution
from memfit.process_budget import plain_budget_bytes, process_limit
from memfit.recipe import AVAILABLE, LOWERING, Recipe, budget_bytes
from memfit.step.batches import Split, row_count
from memfit.step.captured_loss import with_loss
from memfit.step.captures import Captures
from memfit.step.choice import Choice, describe
from memfit.step.inside import is_distributed
from memfit.step.ledger import Candidate, Ledger
from memfit.step.losses import Loss
from memfit.step.optimizers import parameters_of
from memfit.step.piece import Piece, is_released
from memfit.step.policy import StepPolicy
from memfit.step.update_cost import UpdateCost, untimed_cost, update_cost
from memfit.step.ways import counts, precisions, way_of, ways_to_update
from memfit.step.wishes import AUTOCASTS, Wishes
from memfit.units import format_bytes

_WORTH_A_SEARCH = 0.99  # a plan of what fits as it is must promise to be this much faster
_LONGEST_SEARCH_S = 4.0


def choose(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    batch: Any,
    wishes: Wishes,
    *,
    split: Split,
    captures: Captures | None = None,
) -> tuple[Choice, WithLoss]:
    """The best way to run steps on batches like this one, and the module that its plan is for.

    `captures` are those of an earlier choice for the same model, loss and batch, which allowed its plans the same.
    """
    check_unplanned(model)
    if wishes.budget == AVAILABLE:
        limit = process_limit(Recipe(budget=AVAILABLE), model, Sample((batch,)), optimizer)
        wishes = dataclasses.replace(wishes, budget=plain_budget_bytes(limit))
    if is_distributed(model):
        raise InvalidInput(
            "techniques are chosen for a model of one process; plan and wrap a distributed one without a budget"
        )
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    captures = captures or Captures(
        with_loss(model, loss, batch),
        batch,
        split,
        wishes.recipe,
        budget=wishes.budget,
        external_bytes=held_bytes([optimizer, batch, gradients]),
    )
    _check_trained(captures.subject, optimizer)
    with alone():
        return _Search(captures, optimizer, _rows(batch, wishes), wishes).run()


class _Search:
    def __init__(self, captures: Captures, optimizer: Optimizer, rows: int, wishes: Wishes) -> None:
        self._captures = captures
        self._optimizer = optimizer
        self._rows = rows
        self._wishes = wishes
        self._start = time.monotonic()
        self._costs: dict[tuple[bool, str | None], UpdateCost] = {}
        self._ledger = Ledger(wishes.report)
        self._room_bytes: int | None = None  # that is left of the budget

    def run(self) -> tuple[Choice, WithLoss]:
        subject, ledger = self._captures.subject, self._ledger
        updates = list(ways_to_update(subject.model, self._optimizer, self._wishes, ledger))
        sizes = list(counts(subject.model, self._rows, self._wishes, ledger))
        kinds = list(precisions(self._wishes, ledger))
        for place, count in enumerate(sizes):
            tried = [each for precision in kinds for each in self._try(count, precision, updates)]
            updates = [way for way in updates if self._could_fit_smaller(way, tried)]
            open_us = [self._floor_us(each) for each in tried if way_of(each.policy) in updates]
            if not updates or (ledger.best is not None and min(open_us) >= ledger.best.sample_us):
                reason = "smaller pieces run no faster" if updates else "what remains without activations is too much"
                if sizes[place + 1 :]:
                    listed = ", ".join(map(str, sizes[place + 1 :]))
                    ledger.lose(f"{listed} micro-batches", f"not tried: {reason}")
                break
        if ledger.best is None:
            raise self._infeasible()
        return self._choice(ledger.best), subject

    def _try(self, count: int, precision: str | None, updates: Sequence[dict[str, Any]]) -> list[Candidate]:
        """Look at all ways to run pieces of one size; those that are not planned are returned."""
        policies = [self._wishes.policy(micro_batches=count, precision=precision, **way) for way in updates]
        piece = self._captures.piece(count, precision)
        self._set_room(piece, policies[0])
        plain = [self._unplanned(piece, policy) for policy in policies]
        if self._ledger.limit_bytes is None:
            self._ledger.limit_bytes = budget_bytes(self._wishes.budget, plain[0].peak_bytes)
        for candidate in plain:
            self._ledger.judge(candidate)
        for candidate in sorted(plain, key=self._floor_us):
            self._plan(candidate)
        return plain

    def _could_fit_smaller(self, way: dict[str, Any], tried: Sequence[Candidate]) -> bool:
        """Whether smaller pieces with a way to update are not over the budget for certain."""
        same = [each for each in tried if way_of(each.policy) == way]
        return any(each.piece.least_bytes(each.policy, each.update) <= self._ledger.limit for each in same)

    def _unplanned(self, piece: Piece, policy: StepPolicy) -> Candidate:
        update = self._update_cost(policy)
        return Candidate(
            policy=policy,
            piece=piece,
            update=update,
            peak_bytes=piece.eager_peak_bytes(policy, update),
            sample_us=self._sample_us(policy, piece.own_us, update),
        )

    def _plan(self, plain: Candidate) -> None:
        """Plan the pieces of a candidate, if that could win."""
        policy, piece, update, limit = plain.policy, plain.piece, plain.update, self._ledger.limit
        words = describe(policy, planned=True)
        if not self._is_worth_a_search(plain, words):
            return
        room_bytes = limit - piece.beside_bytes(policy, update)
        planner = piece.planner(released=is_released(policy))
        floor_bytes = planner.floor_bytes() + piece.beside_bytes(policy, update)
        floor_bytes = max(floor_bytes, piece.end_bytes(policy, update))
        if floor_bytes > limit:
            self._ledger.over(words, floor_bytes, plain, "needs at least that")
            return
        for _ in range(2):  # the planner's count of what the pass holds is close, the simulator's is exact
            try:
                solution = planner.solve(room_bytes, time_limit_s=self._search_s())
            except InfeasibleBudget:
                break
            candidate = self._planned(plain, solution)
            if candidate is None:
                break
            if candidate.peak_bytes <= limit:
                self._ledger.judge(candidate)
                return
            room_bytes -= candidate.peak_bytes - limit
        self._ledger.over(words, None, plain, "no plan was found under the budget")

    def _is_worth_a_search(self, plain: Candidate, words: str) -> bool:
        """See Note [What need not be tried]."""
        best, floor_us = self._ledger.best, self._floor_us(plain)
        if best is None:
            return True
        fits = plain.peak_bytes <= self._ledger.limit
        if floor_us < (_WORTH_A_SEARCH if fits else 1.0) * best.sample_us:
            return True
        at_best = f"{floor_us / best.sample_us - 1:+.1%}" if floor_us > best.sample_us else "less than 1% faster"
        self._ledger.lose(words, f"not searched: no plan can win ({at_best} at best)")
        return False

    def _planned(self, plain: Candidate, solution: Solution) -> Candidate | None:
        piece, policy = plain.piece, plain.policy
        planner = piece.planner(released=is_released(policy))
        program = piece.runnable(program_of(planner.problem, solution.expansion))
        if program is None:
            return None
        return dataclasses.replace(
            plain,
            program=program,
            solution=solution,
            peak_bytes=piece.planned_peak_bytes(program, policy, plain.update),
            sample_us=self._sample_us(policy, planner.problem.own_time_us + solution.expansion.extra_us, plain.update),
        )

    def _update_cost(self, policy: StepPolicy) -> UpdateCost:
        key = policy.is_updated_in_parts, policy.state_tier
        if key not in self._costs:
            self._costs[key] = update_cost(self._optimizer, policy, self._room_bytes)
        return self._costs[key]

    def _set_room(self, piece: Piece, policy: StepPolicy) -> None:
        """Find what is left of the budget for updates that are run to be timed."""
        if self._room_bytes is None and self._wishes.budget is not None:
            update = untimed_cost(self._optimizer, policy)
            limit_bytes = budget_bytes(self._wishes.budget, piece.eager_peak_bytes(policy, update))
            self._room_bytes = max(0, limit_bytes - self._captures.live_bytes())

    def _sample_us(self, policy: StepPolicy, piece_us: float, update: UpdateCost) -> float:
        updates = update.time_us / policy.accumulate
        return (policy.micro_batches * piece_us + updates) / self._rows

    def _floor_us(self, plain: Candidate) -> float:
        return self._sample_us(plain.policy, plain.piece.least_us, plain.update)

    def _search_s(self) -> float:
        left_s = self._wishes.time_limit_s - (time.monotonic() - self._start)
        return min(_LONGEST_SEARCH_S, max(0.2, left_s / 2))

    def _choice(self, best: Candidate) -> Choice:
        return Choice(
            model=type(self._captures.subject.model).__name__,
            budget_bytes=self._ledger.limit,
            sample_count=self._rows,
            policy=best.policy,
            plan=best.plan(),
            peak_bytes=best.peak_bytes,
            sample_us=best.sample_us,
            times_measured=best.piece.are_timed(best.program) and best.update.is_timed,
            alternatives=self._ledger.alternatives(best),
            seconds=time.monotonic() - self._start,
        )

    def _infeasible(self) -> InfeasibleBudget:
        """The smallest budget that can be met: of the alternatives that came nearest, the lowest plans."""
        smallest_bytes, words = min(self._smallest_plans(), key=lambda each: each[0])
        wishes = self._wishes
        lowering = [] if wishes.directory else ["directory=... (optimizer state on disk)"]
        if "micro_batches" not in wishes.fixed:
            lowering.append("a batch of fewer samples")
        allowed = (*wishes.recipe.allow, *wishes.allow)
        lowering += [f"allow=({each!r},)" for each in (*LOWERING, *AUTOCASTS) if each not in allowed]
        return InfeasibleBudget(
            f"no way to run this step within {format_bytes(self._ledger.limit)} was found: the smallest that was needs "
            f"{format_bytes(smallest_bytes)} ({words}); give a bigger budget, or what lowers it: {', '.join(lowering)}",
            smallest_bytes=smallest_bytes,
        )

    def _smallest_plans(self) -> Iterator[tuple[int, str]]:
        seen: set[tuple[int, bool]] = set()
        for each in self._ledger.nearest():
            piece, policy, update = each.piece, each.policy, each.update
            yield piece.eager_peak_bytes(policy, update), describe(policy, planned=False)
            key = id(piece), is_released(policy)
            if len(seen) == 2 and key not in seen:
                continue
            seen.add(key)
            planner = piece.planner(released=is_released(policy))
            lowest = planner.smallest(time_limit_s=_LONGEST_SEARCH_S)
            planner.found.append(lowest.expansion)
            program = piece.runnable(program_of(planner.problem, lowest.expansion))
            if program is not None:
                yield piece.planned_peak_bytes(program, policy, update), describe(policy, planned=True)


def _rows(batch: Any, wishes: Wishes) -> int:
    try:
        return row_count(batch)
    except InvalidInput:
        if wishes.fixed.get("micro_batches") != 1:
            raise
        return 1  # a batch that is not cut need not be counted


def _check_trained(subject: nn.Module, optimizer: Optimizer) -> None:
    own = {id(parameter) for parameter in subject.parameters()}
    if any(id(parameter) not in own for parameter in parameters_of(optimizer)):
        raise InvalidInput(
            "the optimizer trains parameters that the model does not have, which a captured step would not see; put "
            "all that is trained into one module, or choose the techniques by hand without a budget"
        )
