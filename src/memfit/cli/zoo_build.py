"""Make the plans of the zoo that are missing. Run again, it goes on where it stood."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from memfit import api
from memfit.cli.options import FloatType
from memfit.cli.progress import Display
from memfit.cli.subject import Subject
from memfit.plan.frontier import Frontier
from memfit.plan.plan import Plan
from memfit.prepare import prepare, traced_for
from memfit.recipe import Recipe
from memfit.zoo import store
from memfit.zoo.catalog import FRACTIONS, Case, plan_name, step_name
from memfit.zoo.entry import Entry
from memfit.zoo.sizes import Sizes

_SAME_SHARE = 0.005


@dataclasses.dataclass(frozen=True)
class Place:
    """A case on one of its devices."""

    case: Case
    device: str

    @property
    def is_here(self) -> bool:
        return self.device == "cpu"

    def __str__(self) -> str:
        return f"{self.case.name} x{self.case.batch_size} on {self.device}"


def build(
    cases: Sequence[Case],
    folder: Path,
    *,
    time_limit_s: float,
    seed: int,
    again: bool,
    shown: Display,
    report: Callable[[str], None],
) -> None:
    """Plan what has no plan yet, one case and device after the other; the list is written after each."""
    listed = {each.name: each for each in store.read_index(folder)}
    places = [Place(case, device) for case in cases for device in case.devices]
    for number, place in enumerate(places, start=1):
        name_of_step = step_name(place.case, place.device)
        has_sizes = not place.is_here or store.has_sizes(folder, name_of_step)
        has_plans = any(each.step_name == name_of_step for each in listed.values())
        if has_plans and has_sizes and not again:
            continue
        shown.doing(f"{number}/{len(places)}: {place}")
        if has_plans and not again:
            store.write_sizes(folder, name_of_step, _sizes(place, shown))
            report(f"sizes of {place}")
            continue
        curve = _curve(place, time_limit_s, seed, shown)
        if curve.was_interrupted:
            raise KeyboardInterrupt  # what is half done is not stored: it would be taken for done
        for name, plan in _named_plans(place, curve):
            store.write_plan(folder, name, plan)
            listed[name] = Entry.of(name, place.case, plan)
        if place.is_here:
            store.write_sizes(folder, name_of_step, _sizes(place, shown))
        store.write_index(folder, list(listed.values()))
        report(str(place))


def subject_of(case: Case | Entry) -> Subject:
    """Model and sample of a case."""
    dtype = None if case.dtype is None else FloatType(case.dtype)
    return Subject.of(case.reference, list(case.inputs), None, dtype)


def _curve(place: Place, time_limit_s: float, seed: int, shown: Display) -> Frontier:
    case = place.case
    subject = subject_of(case)
    model, sample = subject.with_weights(seed) if place.is_here else subject.without_weights()
    return api.frontier(
        model,
        sample,
        fractions=FRACTIONS,
        optimizer=case.optimizer,
        outputs=case.outputs,
        device=None if place.is_here else place.device,
        time_limit=time_limit_s * (len(FRACTIONS) + 1),
        progress=shown.measured,
    )


def _sizes(place: Place, shown: Display) -> Sizes:
    """What was measured for the plans: it is remembered on disk, so that this measures nothing anew."""
    case = place.case
    recipe = Recipe(budget="smallest", optimizer=case.optimizer, outputs=case.outputs, progress=shown.measured)
    model, sample = subject_of(case).without_weights()
    with traced_for(model, sample, recipe) as joint:
        return Sizes.of(prepare(model, joint, sample, recipe, timed=False))


def _named_plans(place: Place, curve: Frontier) -> Iterator[tuple[str, Plan]]:
    """Plans with their names; the last of a curve is the smallest."""
    for plan in curve:
        yield plan_name(place.case, place.device, _share(plan)), plan


def _share(plan: Plan) -> float | None:
    """Which of the shares a plan was made for; None: the smallest."""
    assert plan.budget_bytes is not None
    part_bytes = plan.unplanned_peak_bytes - plan.persistent_bytes
    share = (plan.budget_bytes - plan.persistent_bytes) / part_bytes
    return next((each for each in FRACTIONS if abs(each - share) < _SAME_SHARE), None)
