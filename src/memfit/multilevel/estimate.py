"""The peak of a whole multilevel program before it runs.

One cycle, in which every problem steps, is run twice on tensors without memory: the first time optimizers make
their state, the second time live bytes are followed. Between the two, each distinct operator is run once by itself to
learn what it allocates inside. Levels with a budget are planned first and counted as they run by their plan, and so
are updates inside the backward pass and optimizer states in another tier.
"""

import dataclasses
from typing import TYPE_CHECKING

from memfit.errors import InvalidInput, MemfitError, first_line
from memfit.measure.live import AnsweredQuestions, LiveBytes
from memfit.measure.peak import held_bytes
from memfit.measure.probe import measured_costs
from memfit.multilevel.rehearsal import rehearsed
from memfit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from memfit.multilevel.engine import Engine

_MOST_ITERATIONS = 10_000  # of one cycle, before something must be wrong


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelPeak:
    """The greatest live bytes while one problem steps, hypergradients through others included."""

    name: str
    peak_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CycleEstimate:
    """Predicted memory of one full cycle of an engine."""

    peak_bytes: int
    resident_bytes: int  # parameters, buffers, optimizer states of all levels
    levels: tuple[LevelPeak, ...]  # the lowest first

    def fits(self, budget: int | float | str) -> bool:
        """Whether the cycle stays within a number of bytes."""
        return self.peak_bytes <= parse_bytes(budget)

    def __str__(self) -> str:
        levels = ", ".join(f"{level.name} {format_bytes(level.peak_bytes)}" for level in self.levels)
        return (
            f"predicted peak of a cycle {format_bytes(self.peak_bytes)} (of which resident "
            f"{format_bytes(self.resident_bytes)}); while each level steps: {levels}"
        )


def estimate_cycle(engine: "Engine") -> CycleEstimate:
    """Predict the peak of one cycle; the engine is left as it is."""
    engine.make_plans()
    modules = [problem.module for problem in engine.problems]
    module_bytes = held_bytes(modules)
    try:
        with rehearsed(engine), AnsweredQuestions(), LiveBytes(notes_calls=True) as live:
            engine.watch = _Watch(live)
            _run_cycle(engine)
            live.costs = measured_costs(live.calls, device=str(engine.problems[0].torch_device))
            optimizers = [problem.optimizer for problem in engine.problems if problem.optimizer is not None]
            state_bytes = held_bytes(optimizers)
            live.start_anew()
            engine.watch = watch = _Watch(live)
            _run_cycle(engine)
    except MemfitError:
        raise
    except Exception as error:
        raise InvalidInput(
            f"the program could not be run without memory ({type(error).__name__}: {first_line(error)}); a "
            "training_step or hook looks at values, which there are none of, or makes shapes that depend on them"
        ) from error
    finally:
        engine.watch = None
    levels = tuple(
        LevelPeak(name=problem.name, peak_bytes=module_bytes + watch.peaks[problem.name])
        for problem in engine.dependencies.lowest_first
    )
    return CycleEstimate(
        peak_bytes=max(level.peak_bytes for level in levels),
        resident_bytes=module_bytes + state_bytes,
        levels=levels,
    )


class _Watch:
    """The peak while each problem steps; problems that step inside another's turn have their own."""

    def __init__(self, live: LiveBytes) -> None:
        self.peaks: dict[str, int] = {}
        self._live = live

    def step_begins(self) -> None:
        self._live.start_anew()

    def step_ended(self, name: str) -> None:
        self.peaks[name] = max(self.peaks.get(name, 0), self._live.peak_bytes)


def _run_cycle(engine: "Engine") -> None:
    before = {problem: problem.count for problem in engine.problems}
    for _ in range(_MOST_ITERATIONS):
        engine.train_step()
        if all(problem.count > before[problem] for problem in engine.problems):
            return
    late = [problem.name for problem in engine.problems if problem.count == before[problem]]
    raise InvalidInput(
        f"{', '.join(map(repr, late))} made no step in {_MOST_ITERATIONS} iterations; lower unroll_steps below them"
    )
