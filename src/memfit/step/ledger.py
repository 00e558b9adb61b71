"""The books of a choice: what fits, what lost and why, what came nearest."""

import dataclasses
import logging
from typing import Any

from memfit.ir import Program
from memfit.pipeline import write_plan
from memfit.plan.plan import Plan
from memfit.plan.solve import Solution
from memfit.step.choice import CHOSEN, Alternative, describe
from memfit.step.piece import Piece, is_released
from memfit.step.policy import StepPolicy
from memfit.step.update_cost import UpdateCost
from memfit.step.wishes import Report
from memfit.units import format_bytes

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to run the step, with its price."""

    policy: StepPolicy
    piece: Piece
    update: UpdateCost
    peak_bytes: int
    sample_us: float
    program: Program | None = None  # None: as it is
    solution: Solution | None = None  # that the program was made from

    @property
    def words(self) -> str:
        return describe(self.policy, planned=self.program is not None)

    def plan(self) -> Plan | None:
        """The plan of a piece, by the measure of one pass that starts without gradients."""
        if self.solution is None or self.program is None:
            return None
        piece, prepared = self.piece, self.piece.prepared
        planner = piece.planner(released=is_released(self.policy))
        peak_bytes = prepared.peak_bytes(self.program)
        plan = write_plan(
            piece.subject, piece.sample, planner, prepared, piece.recipe, self.solution, peak_bytes, prepared.seconds
        )
        return dataclasses.replace(
            plan, model=type(piece.subject.model).__name__, program=self.program, peak_bytes=peak_bytes
        )


class Ledger:
    """Everything that was looked at under one budget."""

    def __init__(self, report: Report | None) -> None:
        self.limit_bytes: int | None = None  # known once a fraction can be turned into bytes
        self._report = report
        self._fitting: list[Candidate] = []
        self._lost: list[Alternative] = []
        self._over: list[tuple[int, Candidate]] = []  # over the budget, by what they need

    @property
    def limit(self) -> int:
        assert self.limit_bytes is not None
        return self.limit_bytes

    @property
    def best(self) -> Candidate | None:
        return min(self._fitting, key=lambda each: each.sample_us, default=None)

    def nearest(self) -> list[Candidate]:
        """What is over the budget, the least first."""
        return [candidate for _, candidate in sorted(self._over, key=lambda each: each[0])]

    def judge(self, candidate: Candidate) -> None:
        """Note a candidate with a price: it fits or it does not."""
        if candidate.peak_bytes > self.limit:
            self.over(candidate.words, candidate.peak_bytes, candidate, "")
            return
        self._fitting.append(candidate)
        self._tell(
            Alternative(
                techniques=candidate.words,
                peak_bytes=candidate.peak_bytes,
                sample_us=candidate.sample_us,
                verdict="fits",
            )
        )

    def over(self, words: str, peak_bytes: int | None, candidate: Candidate, what: str) -> None:
        """Note what is over the budget, or what no plan under it was found for."""
        self._over.append((peak_bytes or candidate.peak_bytes, candidate))
        excess = "" if peak_bytes is None else f"over the budget by {format_bytes(peak_bytes - self.limit)}"
        is_priced = not what
        self._note(
            Alternative(
                techniques=words,
                peak_bytes=peak_bytes,
                sample_us=candidate.sample_us if is_priced else None,
                verdict=": ".join(each for each in (excess, what) if each),
            )
        )

    def lose(self, words: str, verdict: str) -> None:
        """Note what was not priced, and why."""
        self._note(Alternative(techniques=words, verdict=verdict))

    def alternatives(self, best: Candidate) -> tuple[Alternative, ...]:
        """Everything, the chosen one first."""
        fitting = [
            Alternative(
                techniques=each.words,
                peak_bytes=each.peak_bytes,
                sample_us=each.sample_us,
                verdict=CHOSEN if each is best else f"slower by {each.sample_us / best.sample_us - 1:.1%}",
            )
            for each in self._fitting
        ]
        fitting.sort(key=_rank)
        return (*fitting, *self._lost)

    def _note(self, alternative: Alternative) -> None:
        self._lost.append(alternative)
        self._tell(alternative)

    def _tell(self, alternative: Alternative) -> None:
        log.info("%s: %s", alternative.techniques, alternative.verdict)
        if self._report is not None:
            self._report(alternative)


def _rank(alternative: Alternative) -> tuple[Any, ...]:
    return not alternative.is_chosen, alternative.sample_us
