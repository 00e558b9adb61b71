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
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memfit.capture.with_loss import WithLoss
from memfit.errors import InfeasibleBudget, InvalidInput, first_line
from memfit.execute.attach import check_unplanned
from memfit.pipeline import TECHNIQUES, budget_bytes, write_plan
from memfit.plan.expand import program_of
from memfit.plan.plan import Plan
from memfit.plan.solve import Solution
from memfit.step.batches import Split, map_tensors, row_count
from memfit.step.captured_loss import fields_of, with_loss
from memfit.step.choice import CHOSEN, Alternative, Choice, describe
from memfit.step.inside import is_distributed
from memfit.step.losses import Loss
from memfit.step.mixing import check_separable
from memfit.step.optimizers import parameters_of
from memfit.step.piece import Piece, is_released
from memfit.step.policy import StepPolicy
from memfit.step.precision import in_bfloat16
from memfit.step.update_cost import UpdateCost, update_cost
from memfit.step.updater import check_updates
from memfit.step.wishes import AUTOCASTS, Wishes
from memfit.units import format_bytes

log = logging.getLogger(__name__)

_WORTH_A_SEARCH = 0.99  # a plan of what fits as it is must promise to be this much faster
_LONGEST_SEARCH_S = 4.0


def choose(
    model: nn.Module, optimizer: Optimizer, loss: Loss, batch: Any, wishes: Wishes, *, split: Split
) -> tuple[Choice, WithLoss]:
    """The best way to run steps on batches like this one, and the module that its plan is for."""
    check_unplanned(model)
    if is_distributed(model):
        raise InvalidInput(
            "techniques are chosen for a model of one process; plan and wrap a distributed one without a budget"
        )
    subject = with_loss(model, loss, batch)
    _check_trained(subject, optimizer)
    return _Search(subject, optimizer, batch, wishes, split).run()


@dataclasses.dataclass
class _Candidate:
    """A way to run the step while the search is on."""

    policy: StepPolicy
    piece: Piece
    update: UpdateCost
    peak_bytes: int
    sample_us: float
    planned: bool = False
    program: Any = None
    solution: Solution | None = None


class _Search:
    def __init__(self, subject: WithLoss, optimizer: Optimizer, batch: Any, wishes: Wishes, split: Split) -> None:
        self._subject = subject
        self._optimizer = optimizer
        self._batch = batch
        self._wishes = wishes
        self._split = split
        self._start = time.monotonic()
        self._rows = _rows(batch, wishes)
        self._costs: dict[tuple[bool, str | None], UpdateCost] = {}
        self._limit_bytes: int | None = None
        self._candidates: list[_Candidate] = []
        self._lost: list[Alternative] = []
        self._nearest: list[tuple[int, Piece, StepPolicy, UpdateCost]] = []  # over the budget, by what they need

    def run(self) -> tuple[Choice, WithLoss]:
        updates = list(self._ways_to_update())
        counts = list(self._counts())
        precisions = list(self._precisions())
        for place, count in enumerate(counts):
            tried = [each for precision in precisions for each in self._try(count, precision, updates)]
            updates = [way for way in updates if self._could_fit_smaller(way, tried)]
            open_us = [self._floor_us(each) for each in tried if _way(each.policy) in updates]
            if not updates or (self._best is not None and min(open_us) >= self._best.sample_us):
                reason = "smaller pieces run no faster" if updates else "what remains without activations is too much"
                if counts[place + 1 :]:
                    self._lose(f"{_listed(counts[place + 1 :])} micro-batches", f"not tried: {reason}")
                break
        if self._best is None:
            raise self._infeasible()
        return self._choice(self._best), self._subject

    # What there is to try

    def _counts(self) -> Iterator[int]:
        """Numbers of micro-batches, each about twice the last; divisors of the batch where there are some."""
        if "micro_batches" in self._wishes.fixed:
            yield self._wishes.fixed["micro_batches"]
            return
        yield 1
        try:
            if "batch-statistics" not in self._wishes.allow:
                check_separable(self._subject.model)
        except InvalidInput as error:
            self._lose("micro-batches", f"refused: {_reason(error)}")
            return
        target = 2
        while target < self._rows:
            divisors = (each for each in range(target, min(2 * target, self._rows)) if not self._rows % each)
            yield next(divisors, target)
            target *= 2
        if self._rows > 1:
            yield self._rows

    def _precisions(self) -> Iterator[str | None]:
        if "precision" in self._wishes.fixed:
            yield self._wishes.fixed["precision"]
            return
        yield None
        for name in AUTOCASTS:
            if name in self._wishes.allow:
                yield name
            else:
                self._lose(name, f"not exact and not allowed; allow=({name!r},) lets it be chosen")
        self._lose("pure-bf16", 'not exact; precision="pure-bf16" fixes it')
        missing = [each for each in TECHNIQUES if each not in self._wishes.recipe.allow]
        if missing:
            self._lose(f"plans with {', '.join(missing)}", "not allowed; allow=(...) names what plans may do")
        self._lose("a low-bit optimizer", "another optimizer than yours; make one of torchao and give it")

    def _ways_to_update(self) -> Iterator[dict[str, Any]]:
        tiers: list[str | None] = [None]
        if "state_tier" in self._wishes.fixed:
            tiers = [self._wishes.fixed["state_tier"]]
        elif next(iter(parameters_of(self._optimizer))).device.type != "cpu":
            tiers.append("host")
        elif self._wishes.directory is not None:
            tiers.append("disk")
        else:
            self._lose("optimizer state in the disk tier", "not allowed; directory=... says where")
        updates = [self._wishes.fixed["update"]] if "update" in self._wishes.fixed else ["after", "inside"]
        for tier, update in itertools.product(tiers, updates):
            way = {"state_tier": tier, "update": update}
            try:
                check_updates(self._subject.model, self._optimizer, self._wishes.policy(**way))
            except InvalidInput as error:
                words = describe(StepPolicy(update=update), planned=False) if tier is None else f"{tier} tier, {update}"
                self._lose(words, f"refused: {_reason(error)}")
                continue
            yield way

    # Trying

    def _try(self, count: int, precision: str | None, updates: Sequence[dict[str, Any]]) -> list[_Candidate]:
        """Look at all ways to run pieces of one size; those that are not planned are returned."""
        policies = [self._wishes.policy(micro_batches=count, precision=precision, **way) for way in updates]
        piece = self._captured(policies[0])
        plain = [self._unplanned(piece, policy) for policy in policies]
        if self._limit_bytes is None:
            self._limit_bytes = budget_bytes(self._wishes.budget, plain[0].peak_bytes)
        for candidate in plain:
            self._judge(candidate)
        for candidate in sorted(plain, key=self._floor_us):
            self._plan(candidate)
        return plain

    def _could_fit_smaller(self, way: dict[str, Any], tried: Sequence[_Candidate]) -> bool:
        """Whether smaller pieces with a way to update are not over the budget for certain."""
        same = [each for each in tried if _way(each.policy) == way]
        return any(each.piece.least_bytes(each.policy, each.update) <= self._limit for each in same)

    def _captured(self, policy: StepPolicy) -> Piece:
        pieces = [self._batch] if policy.micro_batches == 1 else list(self._split(self._batch, policy.micro_batches))
        piece = pieces[0]
        if policy.precision == "pure-bf16":
            piece = map_tensors(in_bfloat16, piece)
        log.info("capturing one of %d micro-batches", policy.micro_batches)
        return Piece.captured(
            self._subject, fields_of(piece), [self._batch, pieces], self._wishes.recipe, policy.precision
        )

    def _unplanned(self, piece: Piece, policy: StepPolicy) -> _Candidate:
        update = self._update_cost(policy)
        return _Candidate(
            policy=policy,
            piece=piece,
            update=update,
            peak_bytes=piece.eager_peak_bytes(policy, update),
            sample_us=self._sample_us(policy, piece.own_us, update),
        )

    def _plan(self, plain: _Candidate) -> None:
        """Plan the pieces of a candidate, if that could win."""
        policy, piece, update, best = plain.policy, plain.piece, plain.update, self._best
        words, floor_us = describe(policy, planned=True), self._floor_us(plain)
        fits = plain.peak_bytes <= self._limit
        if best is not None and (floor_us >= best.sample_us or (fits and floor_us >= _WORTH_A_SEARCH * best.sample_us)):
            at_best = f"{floor_us / best.sample_us - 1:+.1%}" if floor_us > best.sample_us else "less than 1% faster"
            self._lose(words, f"not searched: no plan can win ({at_best} at best)")
            return
        room_bytes = self._limit - piece.beside_bytes(policy, update)
        planner = piece.planner(released=is_released(policy))
        floor_bytes = planner.floor_bytes() + piece.beside_bytes(policy, update)
        floor_bytes = max(floor_bytes, piece.end_bytes(policy, update))
        if floor_bytes > self._limit:
            self._over(words, floor_bytes, plain, "needs at least that")
            return
        for _ in range(2):  # the planner's count of what the pass holds is close, the simulator's is exact
            try:
                solution = planner.solve(room_bytes, time_limit_s=self._search_s())
            except InfeasibleBudget:
                break
            candidate = self._planned(plain, solution)
            if candidate is None:
                break
            if candidate.peak_bytes <= self._limit:
                self._judge(candidate)
                return
            room_bytes -= candidate.peak_bytes - self._limit
        self._over(words, None, plain, "no plan was found under the budget")

    def _planned(self, plain: _Candidate, solution: Solution) -> _Candidate | None:
        piece, policy = plain.piece, plain.policy
        planner = piece.planner(released=is_released(policy))
        program = piece.runnable(program_of(planner.problem, solution.expansion))
        if program is None:
            return None
        return dataclasses.replace(
            plain,
            planned=True,
            program=program,
            solution=solution,
            peak_bytes=piece.planned_peak_bytes(program, policy, plain.update),
            sample_us=self._sample_us(policy, planner.problem.own_time_us + solution.expansion.extra_us, plain.update),
        )

    def _update_cost(self, policy: StepPolicy) -> UpdateCost:
        key = policy.is_updated_in_parts, policy.state_tier
        if key not in self._costs:
            self._costs[key] = update_cost(self._optimizer, policy)
        return self._costs[key]

    def _sample_us(self, policy: StepPolicy, piece_us: float, update: UpdateCost) -> float:
        updates = update.time_us / policy.accumulate
        return (policy.micro_batches * piece_us + updates) / self._rows

    def _floor_us(self, plain: _Candidate) -> float:
        return self._sample_us(plain.policy, plain.piece.least_us, plain.update)

    def _search_s(self) -> float:
        left_s = self._wishes.time_limit_s - (time.monotonic() - self._start)
        return min(_LONGEST_SEARCH_S, max(0.2, left_s / 2))

    # Judging

    @property
    def _limit(self) -> int:
        assert self._limit_bytes is not None
        return self._limit_bytes

    @property
    def _best(self) -> _Candidate | None:
        return min(self._candidates, key=lambda each: each.sample_us, default=None)

    def _judge(self, candidate: _Candidate) -> None:
        words = describe(candidate.policy, planned=candidate.planned)
        if candidate.peak_bytes > self._limit:
            self._over(words, candidate.peak_bytes, candidate, "")
            return
        self._candidates.append(candidate)
        self._tell(
            Alternative(
                techniques=words, peak_bytes=candidate.peak_bytes, sample_us=candidate.sample_us, verdict="fits"
            )
        )

    def _over(self, words: str, peak_bytes: int | None, plain: _Candidate, what: str) -> None:
        self._nearest.append((peak_bytes or plain.peak_bytes, plain.piece, plain.policy, plain.update))
        over = "" if peak_bytes is None else f"over the budget by {format_bytes(peak_bytes - self._limit)}"
        is_priced = not what
        self._lost.append(
            Alternative(
                techniques=words,
                peak_bytes=peak_bytes,
                sample_us=plain.sample_us if is_priced else None,
                verdict=": ".join(each for each in (over, what) if each),
            )
        )
        self._tell(self._lost[-1])

    def _lose(self, words: str, verdict: str) -> None:
        self._lost.append(Alternative(techniques=words, verdict=verdict))
        self._tell(self._lost[-1])

    def _tell(self, alternative: Alternative) -> None:
        log.info("%s: %s", alternative.techniques, alternative.verdict)
        if self._wishes.report is not None:
            self._wishes.report(alternative)

    # Answers

    def _choice(self, best: _Candidate) -> Choice:
        fitting = [
            Alternative(
                techniques=describe(each.policy, planned=each.planned),
                peak_bytes=each.peak_bytes,
                sample_us=each.sample_us,
                verdict=CHOSEN if each is best else f"slower by {each.sample_us / best.sample_us - 1:.1%}",
            )
            for each in self._candidates
        ]
        fitting.sort(key=lambda each: (not each.is_chosen, each.sample_us))
        return Choice(
            model=type(self._subject.model).__name__,
            budget_bytes=self._limit,
            sample_count=self._rows,
            policy=best.policy,
            plan=_plan_of(best),
            peak_bytes=best.peak_bytes,
            sample_us=best.sample_us,
            times_measured=best.piece.prepared.times_measured,
            alternatives=(*fitting, *self._lost),
            seconds=time.monotonic() - self._start,
        )

    def _infeasible(self) -> InfeasibleBudget:
        """The smallest budget that can be met: of the alternatives that came nearest, the lowest plans."""
        smallest_bytes, words = min(self._smallest_plans(), key=lambda each: each[0])
        lowering = [] if self._wishes.directory else ["directory=... (optimizer state on disk)"]
        if "micro_batches" not in self._wishes.fixed:
            lowering.append("a batch of fewer samples")
        lowering += [f"allow=({each!r},)" for each in (*TECHNIQUES, *AUTOCASTS) if each not in self._allowed]
        return InfeasibleBudget(
            f"no way to run this step within {format_bytes(self._limit)} was found: the smallest that was needs "
            f"{format_bytes(smallest_bytes)} ({words}); give a bigger budget, or what lowers it: {', '.join(lowering)}",
            smallest_bytes=smallest_bytes,
        )

    @property
    def _allowed(self) -> tuple[str, ...]:
        return (*self._wishes.recipe.allow, *self._wishes.allow)

    def _smallest_plans(self) -> Iterator[tuple[int, str]]:
        seen: set[tuple[int, bool]] = set()
        for _, piece, policy, update in sorted(self._nearest, key=lambda each: each[0]):
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


def _plan_of(best: _Candidate) -> Plan | None:
    """The plan of a piece, by the measure of one pass that starts without gradients."""
    if best.solution is None:
        return None
    piece, prepared = best.piece, best.piece.prepared
    planner = piece.planner(released=is_released(best.policy))
    peak_bytes = prepared.peak_bytes(best.program)
    plan = write_plan(
        piece.subject, piece.sample, planner, prepared, piece.recipe, best.solution, peak_bytes, prepared.seconds
    )
    return dataclasses.replace(
        plan, model=type(piece.subject.model).__name__, program=best.program, peak_bytes=peak_bytes
    )


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


def _way(policy: StepPolicy) -> dict[str, Any]:
    return {"state_tier": policy.state_tier, "update": policy.update}


def _reason(error: InvalidInput) -> str:
    return first_line(error).partition(";")[0]


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))
