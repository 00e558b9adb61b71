"""Whole training steps of a case: what is predicted for them, what they take."""

import dataclasses
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import memfit
from benchmarks.models import Case
from memfit.measure.peak import held_bytes, measure_peak
from memfit.recipe import Recipe
from memfit.step.batches import split_batch
from memfit.step.captured_loss import with_loss
from memfit.step.captures import Captures
from memfit.step.choice import describe
from memfit.step.choose import choose
from memfit.step.update_cost import update_cost
from memfit.step.wishes import Wishes

UNLIMITED = 2**50  # bytes: everything fits


@dataclasses.dataclass
class Steps:
    """The steps of one case: made anew for every row, predicted from captures that all rows share."""

    case: Case
    directory: Path  # of optimizer state on disk
    time_limit_s: float = 12.0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.batch = self.case.make_batch(self.case.batch_size)
        self._captures: dict[tuple[str, ...], Captures] = {}

    @functools.cached_property
    def _trained(self) -> "_Trained":
        return _Trained(self._new_model(None))

    @functools.cached_property
    def _trained_pure(self) -> "_Trained":
        return _Trained(self._new_model("pure-bf16"))

    def choice(self, budget: int | float, *, allow: tuple[str, ...] = (), **fixed: Any) -> memfit.Choice:
        """What is chosen under a budget, with some techniques fixed."""
        wishes = Wishes(
            budget=budget, fixed=fixed, allow=allow, directory=self.directory, time_limit_s=self.time_limit_s
        )
        trained = self._trained_in(fixed.get("precision"))
        key = self._key(allow, fixed.get("precision"))
        if key not in self._captures:
            subject = with_loss(trained.model, self.case.loss, self.batch)
            self._captures[key] = Captures(subject, self.batch, split_batch, Recipe(allow=wishes.recipe.allow))
        captures = self._captures[key]
        return choose(
            trained.model, trained.optimizer, self.case.loss, self.batch, wishes, split=split_batch, captures=captures
        )[0]

    def _trained_in(self, precision: str | None) -> "_Trained":
        """Pure bf16 has other parameters, so it is captured by itself."""
        return self._trained_pure if precision == "pure-bf16" else self._trained

    def _key(self, allow: tuple[str, ...], precision: str | None) -> tuple[str, ...]:
        return (*(each for each in allow if each in memfit.TECHNIQUES), str(precision == "pure-bf16"))

    def predicted_bytes(self, policy: memfit.StepPolicy, allow: tuple[str, ...] = ()) -> int:
        """The peak of a step that is not planned."""
        words = describe(policy, planned=False)
        alternatives = self.choice(UNLIMITED, allow=allow, **_fixed(policy)).alternatives
        found = next(each.peak_bytes for each in alternatives if each.techniques == words)
        assert found is not None
        return found

    def plain_bytes(self, optimizer: Any) -> int:
        """The predicted peak of the plain step with another optimizer, given as its class."""
        policy = memfit.StepPolicy()
        self.choice(UNLIMITED, **_fixed(policy))
        piece = self._captures[self._key((), None)].piece(1, None)
        return piece.eager_peak_bytes(policy, update_cost(optimizer(self._trained.model.parameters()), policy))

    def range_bytes(self, policy: memfit.StepPolicy) -> tuple[int, int]:
        """The predicted peak of a step that is not planned, and what of it is there without any activations."""
        self.choice(UNLIMITED, **_fixed(policy))
        captures = self._captures[self._key((), policy.precision)]
        piece = captures.piece(policy.micro_batches, policy.precision)
        update = update_cost(self._trained_in(policy.precision).optimizer, policy)
        least_bytes = max(
            piece.prepared.persistent_bytes + piece.beside_bytes(policy, update), piece.end_bytes(policy, update)
        )
        if policy.update == "inside":
            least_bytes -= piece.gradient_bytes
        return piece.eager_peak_bytes(policy, update), least_bytes

    def by_hand(self, optimizer: Any = torch.optim.AdamW, **techniques: Any) -> memfit.Step:
        model = self._new_model(techniques.get("precision"))
        return memfit.Step(model, optimizer(model.parameters(), lr=1e-4), self.case.loss, **techniques)

    def chosen(self, choice: memfit.Choice) -> memfit.Step:
        model = self._new_model(choice.policy.precision)
        return memfit.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-4), self.case.loss, choice=choice)

    def _new_model(self, precision: str | None) -> torch.nn.Module:
        torch.manual_seed(0)
        model = self.case.make_model().train()
        return model.to(torch.bfloat16) if precision == "pure-bf16" else model

    def peak_bytes(self, step: memfit.Step) -> int:
        """Of the second step. State on disk is not in memory, so it is not resident."""
        step(self.batch)
        optimizer = [] if step.policy.state_tier == "disk" else [step.optimizer]
        return measure_peak(lambda: step(self.batch), resident=[step.model, self.batch, *optimizer]).peak_bytes

    def ratio(self, first: memfit.Step, second: memfit.Step, *, pairs: int = 5) -> tuple[float, float]:
        """Seconds of the first, and what the second takes of that: medians of pairs in both orders."""
        seconds: list[float] = []
        ratios: list[float] = []
        for number in range(pairs):
            order = (first, second) if number % 2 else (second, first)
            taken = {id(each): self._seconds(each) for each in order}
            seconds.append(taken[id(first)])
            ratios.append(taken[id(second)] / taken[id(first)])
        return statistics.median(seconds), statistics.median(ratios)

    def _seconds(self, step: memfit.Step) -> float:
        start = time.perf_counter()
        step(self.batch)
        return time.perf_counter() - start


class _Trained:
    """A model and its optimizer, that choices are made for."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)


def _fixed(policy: memfit.StepPolicy) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in ("micro_batches", "precision", "update", "state_tier")}


def gradient_bytes(step: memfit.Step) -> int:
    return held_bytes([list(step.model.parameters())])
