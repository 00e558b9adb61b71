"""Random models train as in eager, or are refused in a sentence; `make generated` runs as many as one likes.

A seed that fails is looked into by `python -m generated --seed 17 --shrink`, in the folder tests.
"""

import dataclasses
import os
import signal
from collections.abc import Iterator

import pytest

from generated.children import outcomes_of
from generated.draw import draw
from generated.oracle import CRASH, DIFFERENT, EQUAL, INVALID, REFUSED, SOUND, Outcome, outcome_of
from generated.record import Record
from generated.shrink import script_of, shrink
from generated.specs import FitSpec, LayerSpec, LoopSpec, ModelSpec, Spec

FAST = range(60)
SLOW = range(10_000, 10_200)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("seed", [*FAST, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_a_generated_model_trains_as_in_eager(seed: int, one_thread: None) -> None:
    outcome = outcome_of(draw(seed))
    assert outcome.kind in SOUND, f"{outcome.kind}: {outcome.reason}"


def test_a_seed_is_one_description_and_seeds_differ() -> None:
    kinds = [draw(seed) for seed in range(100)]
    assert len({each.to_json() for each in kinds}) == len(kinds)
    assert draw(7) == draw(7) == Spec.from_json(draw(7).to_json())


def layers(spec: ModelSpec) -> Iterator[str]:
    waiting = list(spec.layers)
    while waiting:
        each = waiting.pop()
        yield each.kind
        waiting += each.inner


def test_all_kinds_of_layers_are_drawn() -> None:
    from generated.layer import LAYERS

    assert {kind for seed in range(600) for kind in layers(draw(seed).model)} == {*LAYERS}


TWO = (LayerSpec("linear", {"width": 8, "bias": True, "how": "plain"}), LayerSpec("relu", {"how": "module"}))


def test_shrinking_takes_away_what_the_failure_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_with_a_relu(spec: Spec) -> Outcome:
        return Outcome(seed=spec.seed, kind=DIFFERENT if "relu" in layers(spec.model) else EQUAL)

    monkeypatch.setattr("generated.shrink.outcome_of", fails_with_a_relu)
    spec = Spec(seed=1, model=ModelSpec(batch=8, layers=(*TWO, *TWO), outputs="nested"), fit=FitSpec(budget=0.5))
    smallest = shrink(spec, fails_with_a_relu(spec))
    assert smallest.model == dataclasses.replace(ModelSpec(), batch=1, size=1, channels=1, layers=TWO[1:])


def test_a_script_runs_by_itself() -> None:
    source = script_of(Spec(seed=1, model=ModelSpec(layers=TWO)))
    assert "generated" not in {line.split()[1].split(".")[0] for line in source.splitlines() if line[:5] == "from "}
    compile(source, "script", "exec")


def test_a_record_goes_on_where_it_stood_also_behind_a_line_that_was_cut_off(tmp_path) -> None:
    path = tmp_path / "generated.json"
    record = Record(path, "eager")
    record.add(Outcome(seed=1))
    record.add(Outcome(seed=2, kind=CRASH, reason="AssertionError: 3 is not 4"))
    lines = next(tmp_path.glob(".*.jsonl"))
    lines.write_text(lines.read_text(encoding="utf-8") + '\n{"seed": 3, "kin', encoding="utf-8")
    again = Record(path, "eager")
    assert [seed in again for seed in (1, 2, 3)] == [True, True, False]
    again.add(Outcome(seed=3, kind=REFUSED, reason="no"))
    again.add(Outcome(seed=4, kind=INVALID))
    again.save()
    assert '"models": 3' in path.read_text(encoding="utf-8")


def test_a_seed_that_ends_its_process_is_an_outcome_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 3 ends it fitted, seed 5 in plain eager as well."""

    def end(spec: Spec) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def outcome(spec: Spec) -> Outcome:
        return end(spec) if spec.seed in (3, 5) else Outcome(seed=spec.seed)

    monkeypatch.setattr("generated.children.outcome_of", outcome)
    monkeypatch.setattr("generated.children.run_plainly", lambda spec: end(spec) if spec.seed == 5 else None)
    found = sorted(outcomes_of([*range(8), 100, 101], "eager", jobs=2), key=lambda each: each.seed)
    assert [each.seed for each in found] == [*range(8), 100, 101]
    assert [each.kind for each in found if each.seed in (3, 5)] == [CRASH, INVALID]
    assert "SIGKILL" in found[3].reason
    assert [each.kind for each in found if each.seed not in (3, 5)] == [EQUAL] * 8


def test_generated_models_run_compiled_kernels_however_small(one_thread: None) -> None:
    """What a softmax adds up to is one, so that gradients are what rounding leaves, in eager as well."""
    model = ModelSpec(domain="rows", batch=16, layers=(LayerSpec("softmax", {"how": "softmax"}),))
    spec = Spec(seed=1, model=model, loop=LoopSpec(loss="sum"), fit=FitSpec(budget=0.9, kernels="inductor"))
    outcome = outcome_of(spec)
    assert (outcome.kind, outcome.rejected) == (EQUAL, 0)
    assert outcome.kernels > 0
