import copy
import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_case import CASE
from torch import nn

from benchmarks import duel as module
from benchmarks.duel import Row, duel
from benchmarks.measuring import Subject


def graphs(budget: float) -> set[str]:
    """Of 0.2 and 0.1 the same, of more than all of the memory none."""
    return {f"forward at {max(budget, 0.2)}", "backward"} if budget <= 1 else set()


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What memfit was given; neither side compiles anything."""
    given: list[int] = []

    def fit(model: nn.Module, sample: Any, budget: int, **_options: Any) -> None:
        given.append(budget)

    plan = SimpleNamespace(allow=("recompute", "lean"))
    monkeypatch.setattr(module, "memfit", SimpleNamespace(fit=fit, plan_of=lambda _: plan))
    monkeypatch.setattr(module, "frontier_cases", lambda: [CASE])
    monkeypatch.setattr(module, "_compiled", lambda subject, budget: (copy.deepcopy(subject.model), graphs(budget)))
    return given


def test_memfit_is_given_what_torch_compile_takes(budgets: list[int]) -> None:
    rows = list(duel(str(CASE), [1.0, 0.5], 0.0))
    peak = module.peak_bytes(Subject.of(CASE), Subject.of(CASE).model)
    assert budgets == [peak, peak]
    assert [row.budget for row in rows] == [1.0, 0.5]
    for row in rows:
        assert row.compile_part == row.memfit_part == pytest.approx(1.0)
        assert row.rounds == module.ROUNDS
        assert row.eager_kernels
        assert 0 < row.memfit_to_compile < 10


def test_budgets_with_the_same_graphs_are_measured_once(budgets: list[int]) -> None:
    first, second, third = duel(str(CASE), [1.0, 0.2, 0.1], 0.0)
    assert len(budgets) == 2
    assert first.same_as is second.same_as is None
    assert third == dataclasses.replace(second, budget=0.1, same_as=0.2)


def test_budgets_for_which_nothing_was_compiled_are_all_measured(budgets: list[int]) -> None:
    assert [row.same_as for row in duel(str(CASE), [1.2, 1.1], 0.0)] == [None, None]
    assert len(budgets) == 2


ROW = Row(
    case="tiny",
    budget=1.0,
    compile_part=0.5,
    memfit_part=0.5,
    compile_to_eager=0.9,
    memfit_to_eager=0.9,
    memfit_to_compile=1.02,
    error=0.01,
    rounds=4,
    eager_kernels=False,
)


def test_two_hundredths_are_no_slower() -> None:
    assert ROW.is_no_slower
    assert not dataclasses.replace(ROW, memfit_to_compile=1.021).is_no_slower


def test_what_is_measured_again_is_so_for_budgets_with_the_same_graphs() -> None:
    same = dataclasses.replace(ROW, budget=0.9, same_as=1.0)
    other = dataclasses.replace(same, case="another")
    again = dataclasses.replace(ROW, memfit_to_compile=0.9)
    rows = {(row.case, row.budget): row for row in (ROW, same, other)}
    expected = {("tiny", 1.0): again, ("tiny", 0.9): dataclasses.replace(same, memfit_to_compile=0.9)}
    assert module.with_row(rows, again) == expected | {("another", 0.9): other}


def test_budgets_with_the_same_graphs_have_one_row_in_the_docs() -> None:
    rows = [ROW, dataclasses.replace(ROW, budget=0.9, same_as=1.0), dataclasses.replace(ROW, budget=0.8)]
    first, second = module.markdown(rows).splitlines()[2:]
    assert first == "| tiny | 1.0, 0.9 | 0.50, 0.50 | 0.90, 0.90 | 1.020 ± 0.010 |"
    assert second.startswith("| tiny | 0.8 |")


def test_rows_are_found_again_unless_they_are_of_another_machine(tmp_path) -> None:
    path = tmp_path / "duel.json"
    assert module._load(path) == {}
    module._save(path, [ROW])
    assert module._load(path) == {("tiny", 1.0): ROW}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "another"}))
    assert module._load(path) == {}
