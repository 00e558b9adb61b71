"""What a choice of techniques is free to do."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from memfit.errors import InvalidBudget, InvalidInput
from memfit.progress import Progress, ProgressLine
from memfit.recipe import EXACT, LOWERING, TECHNIQUES, Budget, Recipe, check_budget
from memfit.step.choice import Alternative
from memfit.step.policy import PERMISSIONS, StepPolicy

AUTOCASTS = {"bf16": "autocast to bf16: rounds", "fp16": "autocast to fp16 with a scaler: rounds"}
Report = Callable[[Alternative], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a choice is free to do."""

    budget: Budget
    fixed: Mapping[str, Any]  # techniques of a policy that are not to be chosen
    allow: tuple[str, ...]  # of `PERMISSIONS`, `TECHNIQUES` and `AUTOCASTS`
    directory: Any = None  # of a disk tier; None: no disk
    time_limit_s: float = 20.0
    report: Report | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        check_budget(self.budget)
        if self.budget in (None, "smallest"):
            raise InvalidBudget(f'the budget of a step is bytes, "6GiB" or a fraction, {self.budget!r} was given')
        known = PERMISSIONS | {name: TECHNIQUES[name] for name in LOWERING} | AUTOCASTS
        unknown = [each for each in self.allow if each not in known]
        if unknown:
            meanings = "; ".join(f"{name!r} ({meaning})" for name, meaning in known.items())
            raise InvalidInput(f"allow is a tuple of names, {unknown[0]!r} is not known; known are {meanings}")

    def policy(self, **chosen: Any) -> StepPolicy:
        permissions = tuple(each for each in self.allow if each in PERMISSIONS)
        directory = self.directory if {**self.fixed, **chosen}.get("state_tier") == "disk" else None
        return StepPolicy(**{**self.fixed, **chosen, "allow": permissions, "directory": directory})

    @property
    def recipe(self) -> Recipe:
        """Of the plans."""
        allow = tuple(dict.fromkeys((*EXACT, *(each for each in self.allow if each in TECHNIQUES))))
        return Recipe(allow=allow, progress=self.progress)

    def told(self, line: ProgressLine) -> "Wishes":
        """Return the same, whose stages are told to a line."""
        looked_at = 0

        def note(alternative: Alternative) -> None:
            nonlocal looked_at
            looked_at += 1
            line.doing(f"choosing techniques, {looked_at} compared")
            if self.report is not None:
                self.report(alternative)

        return dataclasses.replace(self, report=note, progress=line.measured)
