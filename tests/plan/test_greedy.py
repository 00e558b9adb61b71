import time

import pytest
from handmade import KIB, Case, Features, Layer, Step, training, trainings
from hypothesis import given
from hypothesis import strategies as st

from memfit.plan.choice import everything_kept
from memfit.plan.expand import Expansion, expand
from memfit.plan.greedy import greedy

A = 100 * KIB
MODELS = trainings(Features(most_layers=5, several_outputs=True, workspaces=True, in_place=True))


def chain(count: int) -> Case:
    names = ["x", *(f"a{number}" for number in range(count))]
    layers = [
        Layer(Step(f"f{number}", reads=names[number], makes=names[number + 1]), saves=names[number])
        for number in range(count)
    ]
    return training(dict.fromkeys(names[1:], A), layers)


def made_again(expansion: Expansion) -> int:
    """The values that a plan makes in its backward."""
    made = 0
    for ways in expansion.backward:
        for way in ways[:-1]:
            made |= way.makes
    return made


def test_everything_kept_is_what_the_turn_and_later_ones_read() -> None:
    case = chain(3)
    a0, a1 = case.value("a0"), case.value("a1")
    assert everything_kept(case.problem()) == [a0 | a1, a0, 0]


@given(MODELS)
def test_above_the_peak_nothing_is_made_again(case: Case) -> None:
    problem = case.problem()
    unplanned = expand(problem, everything_kept(problem))
    assert greedy(problem, unplanned.peak_bytes) == unplanned


@given(MODELS, st.integers(0, 100))
def test_it_fits_the_budget_or_is_no_higher_above_it_than_the_unplanned(case: Case, percent: int) -> None:
    problem = case.problem()
    unplanned = expand(problem, everything_kept(problem))
    budget_bytes = unplanned.peak_bytes * percent // 100
    found = greedy(problem, budget_bytes)
    assert found.over(budget_bytes) <= unplanned.over(budget_bytes)
    assert (found.peak_bytes <= budget_bytes) == (found.over(budget_bytes) == 0)


@given(MODELS)
def test_it_is_the_same_every_time(case: Case) -> None:
    problem = case.problem()
    budget_bytes = expand(problem, everything_kept(problem)).peak_bytes * 3 // 4
    assert greedy(problem, budget_bytes) == greedy(case.problem(), budget_bytes)


@pytest.mark.parametrize("percent", [80, 60, 40])
def test_a_chain_fits_under_much_less_than_its_peak(percent: int) -> None:
    problem = chain(40).problem()
    unplanned = expand(problem, everything_kept(problem))
    budget_bytes = unplanned.peak_bytes * percent // 100
    found = greedy(problem, budget_bytes)
    assert found.peak_bytes <= budget_bytes
    assert found.extra_us > 0.0


@pytest.mark.parametrize("budget_share", [0.5, 0.0])
def test_three_hundred_operations_take_less_than_a_second(budget_share: float) -> None:
    problem = chain(300).problem()
    budget_bytes = int(budget_share * expand(problem, everything_kept(problem)).peak_bytes)
    start_s = time.process_time()
    greedy(problem, budget_bytes)
    assert time.process_time() - start_s < 1.0


@given(MODELS, st.data())
def test_what_is_to_be_dropped_does_not_live_when_the_backward_starts(case: Case, data: st.DataObject) -> None:
    problem = case.problem()
    dropped = data.draw(st.integers(0, 2 ** len(problem.storages) - 1))
    found = greedy(problem, expand(problem, everything_kept(problem)).peak_bytes, dropped=dropped)
    assert not found.live[0] & dropped


@given(trainings(Features(most_layers=5, workspaces=True, in_place=True)), st.data())
def test_what_is_to_be_kept_and_read_by_the_backward_is_never_made_again(case: Case, data: st.DataObject) -> None:
    problem = case.problem()
    kept = data.draw(st.integers(0, 2 ** len(problem.storages) - 1))
    unplanned = expand(problem, everything_kept(problem))
    for percent in (90, 70, 50):
        found = greedy(problem, unplanned.peak_bytes * percent // 100, kept=kept)
        assert not made_again(found) & kept & unplanned.live[0]


def test_what_is_to_be_kept_is_there_to_make_others_again() -> None:
    case = training(
        {"a": A, "b": 5 * A, "wide": 5 * A, "out": A},
        [
            Layer(Step("costly", reads="x", makes="a", time_us=100.0)),
            Layer(Step("cheap", reads="a", makes="b"), saves="b"),
            Layer(Step("other", reads="x", makes="wide")),
            Layer(Step("last", reads="wide", makes="out")),
        ],
    )
    found = greedy(case.problem(), 12 * A, kept=case.value("a"))
    assert not made_again(found) & case.value("a")
    assert found.extra_us == 1.0
