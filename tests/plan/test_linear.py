import math
from concurrent.futures import ThreadPoolExecutor

import highspy
import pytest

from memfit.plan.linear import LinearProgram


def knapsack() -> tuple[LinearProgram, list[int]]:
    """Leave out as little worth as possible: 60 of weight 10, 100 of 20, 120 of 30, room for 50."""
    program = LinearProgram()
    left_out = [program.variable(worth) for worth in (60.0, 100.0, 120.0)]
    program.at_least(dict(zip(left_out, (10.0, 20.0, 30.0), strict=True)), 10.0 + 20.0 + 30.0 - 50.0)
    return program, left_out


def test_the_best_whole_answer_is_found_and_is_its_own_bound() -> None:
    program, _ = knapsack()
    answer = program.solve(time_limit_s=5.0)
    assert answer.values == pytest.approx([1.0, 0.0, 0.0])
    assert answer.objective == pytest.approx(60.0)
    assert answer.bound == pytest.approx(60.0)


def test_a_relaxed_answer_may_be_broken_and_is_no_worse() -> None:
    program, _ = knapsack()
    answer = program.solve(time_limit_s=5.0, relaxed=True)
    assert answer.objective == answer.bound == pytest.approx(40.0)
    assert answer.values == pytest.approx([0.0, 0.0, 1.0 / 3.0])


def test_a_variable_that_is_not_binary_may_be_anything_between() -> None:
    program = LinearProgram()
    whole, part = program.variable(3.0), program.variable(2.0, binary=False)
    program.at_least({whole: 1.0, part: 1.0}, 0.5)
    assert program.solve(time_limit_s=5.0).values == pytest.approx([0.0, 0.5])


def test_rows_bound_from_both_sides() -> None:
    program = LinearProgram()
    first, second = program.variable(-1.0), program.variable(-2.0)
    program.at_most({first: 1.0, second: 1.0}, 1.0)
    program.at_least({first: 1.0}, 0.0)
    assert program.solve(time_limit_s=5.0).values == pytest.approx([0.0, 1.0])
    assert program.size == (2, 2)


@pytest.mark.parametrize("relaxed", [False, True])
def test_what_cannot_be_has_no_answer_and_an_infinite_bound(relaxed: bool) -> None:
    program = LinearProgram()
    variable = program.variable(1.0)
    program.at_least({variable: 1.0}, 2.0)
    answer = program.solve(time_limit_s=5.0, relaxed=relaxed)
    assert answer.values is None
    assert answer.objective == answer.bound == math.inf


@pytest.mark.parametrize("start", [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
def test_a_start_changes_nothing_about_the_best_answer_whether_it_holds_or_not(start: list[float]) -> None:
    program, _ = knapsack()
    assert program.solve(time_limit_s=5.0, start=start).objective == pytest.approx(60.0)


def test_a_gap_that_is_allowed_still_gives_a_bound_below() -> None:
    program, _ = knapsack()
    answer = program.solve(time_limit_s=5.0, gap=0.5)
    assert answer.bound <= 60.0 <= answer.objective


def test_the_same_program_has_the_same_answer() -> None:
    answers = [knapsack()[0].solve(time_limit_s=5.0) for _ in range(2)]
    assert answers[0] == answers[1]


def test_a_program_can_be_solved_again_after_more_rows() -> None:
    program, left_out = knapsack()
    program.solve(time_limit_s=5.0)
    program.at_most({left_out[0]: 1.0}, 0.0)
    assert program.solve(time_limit_s=5.0).objective == pytest.approx(100.0)


def test_a_program_without_variables_holds_or_not() -> None:
    program = LinearProgram()
    program.at_most({}, 1.0)
    assert program.solve(time_limit_s=1.0).values == []
    program.at_most({}, -1.0)
    assert program.solve(time_limit_s=1.0).values is None


def test_what_is_fixed_is_not_changed() -> None:
    program, (first, *_) = knapsack()
    answer = program.solve(time_limit_s=5.0, fixed={first: 0.0})
    assert answer.values == pytest.approx([0.0, 1.0, 0.0])
    assert program.solve(time_limit_s=5.0).values == pytest.approx([1.0, 0.0, 0.0])


def test_a_pool_that_somebody_started_for_more_threads_is_no_hindrance() -> None:
    def solved_after_others() -> float:
        other = highspy.Highs()
        other.setOptionValue("output_flag", False)
        other.setOptionValue("threads", 2)
        other.addConstr(other.addVariable(lb=0.0, ub=1.0, obj=1.0, type=highspy.HighsVarType.kInteger) >= 0.5)
        assert other.run() == highspy.HighsStatus.kOk
        return knapsack()[0].solve(time_limit_s=5.0).objective

    with ThreadPoolExecutor(1) as thread:  # pools belong to threads, and this one's may be there already
        assert thread.submit(solved_after_others).result(60) == pytest.approx(60.0)
