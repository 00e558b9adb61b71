"""What the staged program says of all schedules holds for each of them."""

import itertools
import math

import hypothesis
import pytest
from exhaustive import Schedules
from handmade import KIB, Case, Features, Layer, Step, training, trainings
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.plan.choice import everything_kept
from memfit.plan.expand import expand
from memfit.plan.greedy import greedy
from memfit.plan.links import Links
from memfit.plan.staged import StagedProgram

A = 100 * KIB


def bound_us(case: Case, budget_bytes: int, stages: list[int] | None = None) -> float:
    """The bound with a stage for every turn, or with these stages."""
    problem = case.problem()
    every = list(range(len(problem.backward)))
    program = StagedProgram(Links(problem), budget_bytes=budget_bytes, stages=stages or every)
    return program.solve(time_limit_s=5.0)[1] + problem.least_own_us


def check(case: Case) -> None:
    schedules = Schedules(case.graph, case.costs, free=False)
    problem = case.problem()
    least_bytes, most_bytes = schedules.least_peak_bytes(), expand(problem, everything_kept(problem)).peak_bytes
    for budget_bytes in (least_bytes, (least_bytes + most_bytes) // 2 // KIB * KIB, most_bytes):
        least_us = schedules.least_extra_us(budget_bytes)
        assert bound_us(case, budget_bytes) <= least_us + 1e-6
        assert bound_us(case, budget_bytes, [0]) <= least_us + 1e-6


@settings(max_examples=30)
@given(trainings(Features(most_layers=5)))
def test_no_schedule_is_below_the_bound(case: Case) -> None:
    check(case)


@settings(max_examples=30)
@given(trainings(Features(in_place=True, alternatives=True)))
def test_nor_is_one_with_alternatives_and_in_place(case: Case) -> None:
    check(case)


def test_an_operation_with_several_outputs_is_charged_once() -> None:
    case = training(
        {"a": A, "c": A, "b": A, "wide": 5 * A, "out": A},
        [
            Layer(Step("first", reads="x", makes="a c", time_us=10.0)),
            Layer(Step("second", reads="a", makes="b", time_us=1.0), saves="b c"),
            Layer(Step("wide", reads="x", makes="wide")),
            Layer(Step("last", reads="wide", makes="out")),
        ],
    )
    check(case)


def test_an_operation_that_makes_two_values_is_in_no_chain_and_so_is_charged_once() -> None:
    case = training(
        {"a": A, "c": A, "b": A, "out": A},
        [
            Layer(Step("first", reads="x", makes="a c", time_us=10.0)),
            Layer(Step("second", reads="a c", makes="b", time_us=1.0), saves="b"),
            Layer(Step("last", reads="b", makes="out")),
        ],
    )
    links = Links(case.problem())
    assert links.inside == 0
    assert [link.time_us for link in links.all] == [10.0, 1.0]


def test_a_lean_backward_that_is_faster_wins_time() -> None:
    case = training(
        {"a": 3 * A, "b": A, "out": A},
        [
            Layer(Step("first", reads="x", makes="a", time_us=6.0)),
            Layer(
                Step("second", reads="a", makes="b", time_us=4.0),
                saves="a",
                lean_saves="b",
                backward_us=9.0,
                lean_us=2.0,
            ),
            Layer(Step("last", reads="b", makes="out"), saves="b"),
        ],
    )
    check(case)


CHAIN = training(
    {"a": 3 * A, "b": 2 * A, "c": 2 * A, "d": A, "out": A},
    [
        Layer(Step("first", reads="x", makes="a", time_us=1.0)),
        Layer(Step("second", reads="a", makes="b", time_us=2.0)),
        Layer(Step("third", reads="b", makes="c", time_us=4.0, may_overwrite="b", in_place_us=3.0), saves="c"),
        Layer(Step("fourth", reads="c", makes="d", time_us=8.0), saves="d"),
        Layer(Step("last", reads="d", makes="out")),
    ],
)


def test_what_one_way_alone_reads_is_inside_a_chain_if_it_is_not_smaller() -> None:
    links = Links(CHAIN.problem())
    assert links.inside == CHAIN.value("a", "b")
    assert links.values == CHAIN.value("c", "d")
    (first, second) = links.all
    assert (first.needs, first.makes, first.operations) == (0, CHAIN.value("c"), frozenset({0, 1, 2}))
    assert (second.needs, second.makes, second.operations) == (CHAIN.value("c"), CHAIN.value("d"), frozenset({3}))


def test_a_chain_takes_the_time_of_all_its_operations_in_place_inside_it() -> None:
    links = Links(CHAIN.problem())
    assert [link.time_us for link in links.all] == [1.0 + 2.0 + 3.0, 8.0]


def test_what_is_smaller_than_what_is_made_from_it_stays_a_value() -> None:
    case = training(
        {"small": A, "big": 3 * A, "out": A},
        [
            Layer(Step("first", reads="x", makes="small")),
            Layer(Step("second", reads="small", makes="big"), saves="big"),
            Layer(Step("last", reads="big", makes="out")),
        ],
    )
    assert Links(case.problem()).inside == 0


def test_what_two_ways_read_stays_a_value_unless_they_make_the_same() -> None:
    layers = [
        Layer(Step("first", reads="x", makes="a")),
        Layer(Step("second", reads="a", makes="b"), saves="b"),
        Layer(Step("third", reads="a", makes="c"), saves="c"),
        Layer(Step("last", reads="b c", makes="out")),
    ]
    sizes = {"a": 3 * A, "b": A, "c": A, "out": A}
    assert Links(training(sizes, layers).problem()).inside == 0
    again = Step("again", reads="a", makes="b", time_us=0.5)
    two = training(sizes, [layers[0], layers[1], Layer(Step("last", reads="b", makes="out"))], alternatives=[again])
    assert Links(two.problem()).inside == two.value("a")


def test_a_budget_that_no_schedule_keeps_is_proven_to_be_one() -> None:
    schedules = Schedules(CHAIN.graph, CHAIN.costs)
    answer, bound = StagedProgram(
        Links(CHAIN.problem()), budget_bytes=schedules.least_peak_bytes() // 2, stages=[0, 1]
    ).solve(time_limit_s=5.0)
    assert answer is None
    assert bound == math.inf


def test_kept_and_dropped_values_are_so_when_the_backward_starts() -> None:
    problem = CHAIN.problem()
    links, budget_bytes = Links(problem), expand(problem, everything_kept(problem)).peak_bytes
    kept = StagedProgram(links, budget_bytes=budget_bytes, stages=[0, 1, 2], kept=CHAIN.value("c"))
    dropped = StagedProgram(links, budget_bytes=budget_bytes, stages=[0, 1, 2], dropped=CHAIN.value("c"))
    for program, expected in ((kept, CHAIN.value("c")), (dropped, 0)):
        answer, _ = program.solve(time_limit_s=5.0)
        assert answer is not None
        assert answer.live[0] & CHAIN.value("c") == expected
    assert dropped.solve(time_limit_s=5.0)[1] == pytest.approx(6.0)


@settings(max_examples=40)
@given(
    trainings(Features(most_layers=6, several_outputs=True, in_place=True, alternatives=True)),
    st.integers(50, 100),
    st.sampled_from([None, 0, 2, 100]),
)
def test_a_schedule_that_fits_is_a_point_that_satisfies_every_row(
    case: Case, percent: int, horizon: int | None
) -> None:
    problem = case.problem()
    budget_bytes = expand(problem, everything_kept(problem)).peak_bytes * percent // 100
    schedule = greedy(problem, budget_bytes)
    hypothesis.assume(schedule.peak_bytes <= budget_bytes)
    stages = range(0, len(problem.backward), 2)
    program = StagedProgram(Links(problem), budget_bytes=budget_bytes, stages=stages, horizon=horizon, start=schedule)
    assert broken_rows(program, program._point(schedule)) == []
    answer, bound = program.solve(time_limit_s=5.0)
    assert answer is not None
    assert answer.extra_us + problem.least_own_us <= schedule.extra_us + 1e-6
    assert bound <= answer.extra_us + 1e-6


def broken_rows(program: StagedProgram, point: list[float]) -> list[int]:
    rows = program.program
    sums = [
        sum(rows._factors[term] * point[rows._columns[term]] for term in range(first, last))
        for first, last in itertools.pairwise(rows._starts)
    ]
    bounds = zip(rows._lower, sums, rows._upper, strict=True)
    return [row for row, (lower, total, upper) in enumerate(bounds) if not lower - 1e-6 <= total <= upper + 1e-6]


@settings(max_examples=30)
@given(trainings(Features(most_layers=6, in_place=True, alternatives=True)), st.integers(50, 100), st.integers(0))
def test_what_is_not_free_stays_as_it_is(case: Case, percent: int, free: int) -> None:
    problem = case.problem()
    budget_bytes = expand(problem, everything_kept(problem)).peak_bytes * percent // 100
    schedule = greedy(problem, budget_bytes)
    hypothesis.assume(schedule.peak_bytes <= budget_bytes)
    links, stages = Links(problem), list(range(0, len(problem.backward), 2))
    program = StagedProgram(links, budget_bytes=budget_bytes, stages=stages, horizon=100, start=schedule)
    answer, _ = program.solve(time_limit_s=5.0, free=free)
    assert answer is not None
    assert answer.extra_us + problem.least_own_us <= schedule.extra_us + 1e-6
    for stage, live in zip(stages, answer.live, strict=True):
        assert (live ^ schedule.live[stage]) & program._stages.useful()[stages.index(stage)] & links.values & ~free == 0


@given(trainings(Features(several_outputs=True, workspaces=True)))
def test_more_stages_never_lower_the_bound(case: Case) -> None:
    problem = case.problem()
    budget_bytes = expand(problem, everything_kept(problem)).peak_bytes * 3 // 4
    assert bound_us(case, budget_bytes, [0]) <= bound_us(case, budget_bytes) + 1e-6
