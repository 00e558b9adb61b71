"""A linear program with binary variables, written row by row and solved by HiGHS."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import highspy
import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The best point found, if any, and what no point can be below."""

    values: Sequence[float] | None
    objective: float
    bound: float


class LinearProgram:
    """Minimise a sum over variables between 0 and 1, under rows `terms >= least` or `terms <= most`."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._binary: list[bool] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._starts: list[int] = [0]
        self._columns: list[int] = []
        self._factors: list[float] = []

    def variable(self, cost: float = 0.0, *, binary: bool = True) -> int:
        self._costs.append(cost)
        self._binary.append(binary)
        return len(self._costs) - 1

    def at_least(self, terms: Mapping[int, float], least: float) -> None:
        self._row(terms, least, math.inf)

    def at_most(self, terms: Mapping[int, float], most: float) -> None:
        self._row(terms, -math.inf, most)

    def _row(self, terms: Mapping[int, float], lower: float, upper: float) -> None:
        self._lower.append(lower)
        self._upper.append(upper)
        self._columns += terms.keys()
        self._factors += terms.values()
        self._starts.append(len(self._columns))

    @property
    def size(self) -> tuple[int, int]:
        return len(self._costs), len(self._lower)

    def solve(
        self,
        *,
        time_limit_s: float,
        relaxed: bool = False,
        start: Sequence[float] | None = None,
        gap: float = 0.0,
        is_over: Callable[[float], bool] | None = None,
        fixed: Mapping[int, float] | None = None,
    ) -> Answer:
        """Deterministic but for where the time limit falls.

        `start` is where to begin, `fixed` has variables that are not to be changed; `is_over` is told the bound so
        far, now and then, and ends it early.
        """
        if not self._costs:  # nothing to decide: HiGHS calls that an empty model, whatever the rows say
            holds = all(lower <= 0.0 <= upper for lower, upper in zip(self._lower, self._upper, strict=True))
            return Answer([], 0.0, 0.0) if holds else Answer(None, math.inf, math.inf)
        solver = highspy.Highs()
        for option, value in (
            ("output_flag", False),
            ("threads", 1),
            ("random_seed", 1),
            ("time_limit", max(0.05, time_limit_s)),
            ("mip_rel_gap", gap),
        ):
            solver.setOptionValue(option, value)
        if is_over is not None:
            solver.cbMipInterrupt += lambda event: event.interrupt() if is_over(event.data_out.mip_dual_bound) else None
        solver.passModel(self._model(relaxed, fixed or {}))
        if start is not None and not relaxed:
            solution = highspy.HighsSolution()
            solution.col_value = list(start)
            solver.setSolution(solution)
        if solver.run() == highspy.HighsStatus.kError:
            # HiGHS has one pool of threads a thread of ours; one that was started for another number is refused.
            highspy.Highs.resetGlobalScheduler(False)  # not waiting for its threads
            solver.run()
        return _answer(solver, relaxed, least=sum(min(0.0, cost) for cost in self._costs))

    def _model(self, relaxed: bool, fixed: Mapping[int, float]) -> highspy.HighsLp:
        model = highspy.HighsLp()
        count = len(self._costs)
        model.num_col_ = count
        model.num_row_ = len(self._lower)
        model.col_cost_ = np.array(self._costs, dtype=np.double)
        lower, upper = np.zeros(count), np.ones(count)
        lower[list(fixed)] = upper[list(fixed)] = list(fixed.values())
        model.col_lower_, model.col_upper_ = lower, upper
        model.row_lower_ = np.array(self._lower, dtype=np.double)
        model.row_upper_ = np.array(self._upper, dtype=np.double)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self._starts, dtype=np.int32)
        model.a_matrix_.index_ = np.array(self._columns, dtype=np.int32)
        model.a_matrix_.value_ = np.array(self._factors, dtype=np.double)
        if not relaxed:
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            model.integrality_ = [kinds[binary] for binary in self._binary]
        return model


def _answer(solver: highspy.Highs, relaxed: bool, least: float) -> Answer:
    """`least` is what no point can be below, whatever the rows say."""
    status = solver.getModelStatus()
    info = solver.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Answer(None, math.inf, math.inf)
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    objective = info.objective_function_value if found else math.inf
    if relaxed:
        solved = status == highspy.HighsModelStatus.kOptimal
        bound = objective if solved else least
    else:
        bound = info.mip_dual_bound
    values = list(solver.getSolution().col_value) if found else None
    return Answer(values, objective, bound if math.isfinite(bound) else least)
