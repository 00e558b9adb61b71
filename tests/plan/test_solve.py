"""Plans against exhaustive search on tiny graphs, and what a planner promises on any."""

import dataclasses

import hypothesis
import pytest
from exhaustive import Schedules
from handmade import KIB, Case, Features, Layer, Step, training, trainings
from hypothesis import given, settings

from memfit.errors import InfeasibleBudget
from memfit.ir import Phase
from memfit.plan.expand import Expansion, program_of
from memfit.plan.problem import Problem
from memfit.plan.simulate import simulate
from memfit.plan.solve import Found, Planner, Solution, _Search

A = 100 * KIB
ONLY_GENERATE = settings(phases=[hypothesis.Phase.generate])  # what is expected to fail need not be made smaller


def chain(count: int, *, size_bytes: int = A, time_us: float = 10.0) -> Case:
    """Layers one after the other, each saving what it reads."""
    names = ["x", *(f"a{number}" for number in range(count))]
    layers = [
        Layer(Step(f"f{number}", reads=names[number], makes=names[number + 1], time_us=time_us), saves=names[number])
        for number in range(count)
    ]
    return training(dict.fromkeys(names[1:], size_bytes), layers)


def residual(count: int) -> Case:
    """Blocks whose input is added to what their two layers make."""
    sizes: dict[str, int] = {"stem": 2 * A}
    layers = [Layer(Step("stem", reads="x", makes="stem", time_us=9.0))]
    block = "stem"
    for number in range(count):
        hidden, out, total = f"h{number}", f"o{number}", f"s{number}"
        sizes |= {hidden: 3 * A, out: 2 * A, total: 2 * A}
        layers += [
            Layer(Step(f"wide{number}", reads=block, makes=hidden, time_us=12.0), saves=block),
            Layer(Step(f"narrow{number}", reads=hidden, makes=out, time_us=7.0), saves=hidden),
            Layer(Step(f"add{number}", reads=f"{block} {out}", makes=total, may_overwrite=out)),
        ]
        block = total
    return training(sizes, layers)


def unet() -> Case:
    """Down and up again, with a skip connection on each level."""
    return training(
        {"d0": 4 * A, "d1": 2 * A, "deep": A, "u1": 2 * A, "u0": 4 * A, "out": A},
        [
            Layer(Step("down0", reads="x", makes="d0", time_us=16.0), saves="x"),
            Layer(Step("down1", reads="d0", makes="d1", time_us=8.0), saves="d0"),
            Layer(Step("bottom", reads="d1", makes="deep", time_us=4.0), saves="d1"),
            Layer(Step("up1", reads="deep d1", makes="u1", time_us=8.0), saves="deep d1"),
            Layer(Step("up0", reads="u1 d0", makes="u0", time_us=16.0), saves="u1 d0"),
            Layer(Step("head", reads="u0", makes="out"), saves="u0"),
        ],
    )


def masked() -> Case:
    """A mask that can be kept in bits, and a value with a cheaper way to make it again."""
    return training(
        {"a": 4 * A, "mask": 4 * A, "b": 4 * A, "out": A, "mask_bits": A // 2},
        [
            Layer(Step("linear", reads="x", makes="a", time_us=20.0), saves="x"),
            Layer(Step("compare", reads="a", makes="mask", time_us=3.0)),
            Layer(Step("select", reads="a mask", makes="b", time_us=4.0), saves="mask", lean_saves="mask_bits"),
            Layer(Step("head", reads="b", makes="out", time_us=2.0), saves="b"),
        ],
        alternatives=[
            Step("pack", reads="mask", makes="mask_bits", time_us=1.0),
            Step("unpack", reads="mask_bits", makes="mask", time_us=2.0),
            Step("again", reads="a mask", makes="b", time_us=3.0),
        ],
    )


HANDMADE = {"chain": chain(6), "residual": residual(2), "unet": unet(), "masked": masked()}


def budgets_of(least_bytes: int, most_bytes: int) -> list[int]:
    """Some from the least possible to just below the unplanned peak."""
    shares = (0.0, 0.125, 0.25, 0.5, 0.99)
    return sorted({least_bytes + int(share * (most_bytes - least_bytes)) // KIB * KIB for share in shares})


def check(case: Case, *, free: bool = False) -> None:
    """The planner finds a plan wherever there is one, as fast as the fastest, and no schedule is below its bound."""
    problem = case.problem()
    schedules = Schedules(case.graph, case.costs, free=free)
    least_bytes = schedules.least_peak_bytes()
    assert Planner(problem).floor_bytes() <= Schedules(case.graph, case.costs).least_peak_bytes()
    for budget_bytes in budgets_of(least_bytes, Planner(problem).unplanned.peak_bytes):
        solution = Planner(problem).solve(budget_bytes)
        assert_fits(case, solution, budget_bytes)
        least_us = schedules.least_extra_us(budget_bytes)
        found_us = solution.expansion.extra_us
        assert solution.bound_us <= least_us + 1e-6
        assert found_us >= Schedules(case.graph, case.costs).least_extra_us(budget_bytes) - 1e-6
        assert found_us <= least_us + 0.02 * max(0.0, least_us) + 0.002 * problem.own_time_us + 1e-6


def assert_fits(case: Case, solution: Solution, budget_bytes: int) -> None:
    program = program_of(case.problem(), solution.expansion)
    timeline = simulate(case.graph, program, workspace_bytes=case.costs.workspace_bytes)
    assert timeline.peak_bytes == solution.expansion.peak_bytes <= budget_bytes


@pytest.mark.parametrize("name", [each for each in HANDMADE if each != "masked"])
def test_plans_of_small_models_are_the_best_there_are(name: str) -> None:
    check(HANDMADE[name])


def test_plans_with_lean_ways_are_the_best_there_are() -> None:
    check(HANDMADE["masked"])


@settings(max_examples=30)
@given(trainings(Features(most_layers=5)))
def test_plans_of_random_models_are_the_best_there_are(case: Case) -> None:
    check(case)


@settings(max_examples=30)
@given(trainings(Features(in_place=True)))
def test_so_they_are_where_operations_may_work_in_place(case: Case) -> None:
    check(case)


@settings(max_examples=30)
@given(trainings(Features(several_outputs=True, workspaces=True)))
def test_so_they_are_with_several_outputs_and_workspaces(case: Case) -> None:
    check(case)


@ONLY_GENERATE
@given(trainings(Features(buffers=True)))
def test_so_they_are_with_buffers(case: Case) -> None:
    check(case)


@ONLY_GENERATE
@given(trainings(Features(alternatives=True)))
def test_so_they_are_with_alternatives(case: Case) -> None:
    check(case)


@ONLY_GENERATE
@given(trainings(Features(in_place_backward=True)))
def test_so_they_are_where_a_gradient_is_written_over_a_value(case: Case) -> None:
    check(case)


@settings(max_examples=30)
@given(trainings(Features(in_place=True, in_place_is_faster=True)))
def test_where_working_in_place_is_faster_no_slower_schedule_is_below_the_bound(case: Case) -> None:
    schedules = Schedules(case.graph, case.costs, free=False)
    for budget_bytes in budgets_of(schedules.least_peak_bytes(), Planner(case.problem()).unplanned.peak_bytes):
        solution = Planner(case.problem()).solve(budget_bytes)
        assert_fits(case, solution, budget_bytes)
        assert solution.bound_us <= max(0.0, schedules.least_extra_us(budget_bytes)) + 1e-6


def test_so_they_are_where_working_in_place_is_faster() -> None:
    case = training(
        {"a": 5 * A, "out": 5 * A},
        [
            Layer(Step("first", reads="x", makes="a", time_us=5.0), saves="a"),
            Layer(Step("second", reads="a", makes="out", time_us=11.0, may_overwrite="a", in_place_us=4.0), saves="a"),
        ],
    )
    check(case)


def test_a_value_may_be_made_before_an_earlier_turn_than_the_one_that_reads_it() -> None:
    case = training(
        {"a": 2 * A, "b": 2 * A, "wide": 5 * A, "out": A},
        [
            Layer(Step("first", reads="x", makes="a", workspace_bytes=A), saves="a"),
            Layer(Step("second", reads="a", makes="b")),
            Layer(Step("third", reads="x", makes="wide")),
            Layer(Step("last", reads="x", makes="out")),
        ],
    )
    check(case, free=True)


@pytest.mark.xfail(strict=True, raises=InfeasibleBudget, reason="before a turn every operation runs once at most")
def test_an_operation_may_run_twice_before_a_turn() -> None:
    check(HANDMADE["residual"], free=True)


def test_a_value_inside_a_chain_may_be_worth_keeping() -> None:
    case = training(
        {"a": 4 * A, "b": 3 * A, "out": 2 * A},
        [
            Layer(Step("first", reads="x", makes="a", time_us=7.0)),
            Layer(Step("second", reads="a", makes="b", time_us=6.0), saves="b"),
            Layer(Step("last", reads="a", makes="out", workspace_bytes=6 * A)),
        ],
    )
    check(case)


def test_packing_has_its_own_moment_in_the_forward() -> None:
    case = training(
        {"a": 2 * A, "mask": 5 * A, "out": A, "mask_bits": A // 2},
        [
            Layer(Step("first", reads="x", makes="a mask", time_us=12.0), saves="a mask", lean_saves="a mask_bits"),
            Layer(Step("last", reads="x", makes="out")),
        ],
        alternatives=[
            Step("pack", reads="mask", makes="mask_bits", time_us=4.0),
            Step("again", reads="x", makes="a", time_us=6.0),
        ],
    )
    check(case)


def test_the_bound_holds_for_values_made_early() -> None:
    case = training(
        {"a": 5 * A, "b": A, "c": A, "out": 2 * A},
        [
            Layer(Step("first", reads="x", makes="a", time_us=11.0)),
            Layer(Step("second", reads="a", makes="b", time_us=16.0), saves="b"),
            Layer(Step("third", reads="a", makes="c", time_us=18.0)),
            Layer(Step("last", reads="a", makes="out", time_us=18.0), saves="a"),
        ],
    )
    check(case, free=True)


def made_again(expansion: Expansion) -> int:
    """The values that a plan makes again."""
    made = 0
    for ways in expansion.backward:
        for way in ways[:-1]:
            made |= way.makes
    return made


LONG = residual(6)


def shares(planner: Planner, *parts: float) -> list[int]:
    floor_bytes, most_bytes = planner.floor_bytes(), planner.unplanned.peak_bytes
    return [floor_bytes + int(part * (most_bytes - floor_bytes)) for part in parts]


def test_the_same_problem_has_the_same_plan() -> None:
    budget_bytes = shares(Planner(LONG.problem()), 0.5)[0]
    first, second = (Planner(LONG.problem()).solve(budget_bytes) for _ in range(2))
    assert first.expansion == second.expansion
    assert first.bound_us == second.bound_us


def test_without_time_there_is_still_a_plan() -> None:
    planner = Planner(LONG.problem())
    budget_bytes = shares(planner, 0.6)[0]
    solution = planner.solve(budget_bytes, time_limit_s=0.0)
    assert_fits(LONG, solution, budget_bytes)
    assert solution.seconds < 1.0


def test_an_interrupt_leaves_the_best_plan_so_far() -> None:
    planner = Planner(LONG.problem())
    budget_bytes = shares(planner, 0.6)[0]

    states: list[Found] = []

    def interrupt_once(found: Found) -> None:
        states.append(found)
        if len(states) == 2:
            raise KeyboardInterrupt

    solution = planner.solve(budget_bytes, report=interrupt_once)
    assert_fits(LONG, solution, budget_bytes)
    assert solution.log[-1].endswith("interrupted: the best plan so far")


def test_an_interrupt_before_there_is_a_plan_goes_through() -> None:
    def interrupt(found: Found) -> None:
        raise KeyboardInterrupt

    planner = Planner(LONG.problem())
    budget_bytes = shares(planner, 0.0)[0]
    with pytest.raises((KeyboardInterrupt, InfeasibleBudget)):
        planner.solve(budget_bytes, report=interrupt)


def test_what_is_found_is_reported_and_gets_better() -> None:
    states: list[Found] = []
    planner = Planner(LONG.problem())
    solution = planner.solve(shares(planner, 0.5)[0], report=states.append)
    slowdowns = [state.slowdown for state in states if state.slowdown is not None]
    assert slowdowns == sorted(slowdowns, reverse=True)
    assert slowdowns[-1] == pytest.approx(solution.expansion.extra_us / LONG.problem().own_time_us)
    assert [state.bound for state in states] == sorted(state.bound for state in states)
    assert len(solution.log) == len(states)


def test_less_memory_never_takes_more_of_it_nor_less_time() -> None:
    planner = Planner(LONG.problem())
    budgets = shares(planner, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    solutions = [planner.solve(budget_bytes) for budget_bytes in budgets]
    for budget_bytes, solution in zip(budgets, solutions, strict=True):
        assert_fits(LONG, solution, budget_bytes)
    times_us = [solution.expansion.extra_us for solution in solutions]
    assert times_us == sorted(times_us, reverse=True)


def test_a_plan_of_a_smaller_budget_is_taken_if_there_is_no_time_for_a_better_one() -> None:
    planner = Planner(LONG.problem())
    small, large = shares(planner, 0.5, 0.51)
    known = planner.solve(small)
    assert planner.solve(large, time_limit_s=0.0).expansion.extra_us <= known.expansion.extra_us


@pytest.mark.parametrize("name", HANDMADE)
def test_above_the_peak_nothing_is_planned(name: str) -> None:
    planner = Planner(HANDMADE[name].problem())
    solution = planner.solve(planner.unplanned.peak_bytes)
    assert solution.expansion == planner.unplanned
    assert solution.expansion.extra_us == solution.bound_us == 0.0


@pytest.mark.parametrize("name", HANDMADE)
def test_below_the_floor_there_is_no_plan(name: str) -> None:
    planner = Planner(HANDMADE[name].problem())
    with pytest.raises(InfeasibleBudget, match="no plan under"):
        planner.solve(planner.floor_bytes() - 1)


def test_the_floor_is_set_by_the_largest_working_set() -> None:
    planner = Planner(HANDMADE["unet"].problem())
    assert HANDMADE["unet"].graph.operation(planner.floor_operation()).name == "back_up0"


@pytest.mark.parametrize("name", [each for each in HANDMADE if each != "masked"])
def test_the_smallest_plan_is_as_low_as_any(name: str) -> None:
    case = HANDMADE[name]
    smallest = Planner(case.problem()).smallest(time_limit_s=5.0)
    assert_fits(case, smallest, smallest.expansion.peak_bytes)
    least_bytes = Schedules(case.graph, case.costs, free=False).least_peak_bytes()
    assert smallest.expansion.peak_bytes <= least_bytes + 0.02 * Planner(case.problem()).unplanned.peak_bytes


@pytest.mark.parametrize("name", ["a1", "a3"])
@pytest.mark.parametrize("part", [0.3, 0.6, 1.0])
def test_what_is_to_be_kept_is_never_made_again(name: str, part: float) -> None:
    case = chain(6)
    planner = Planner(case.problem(), kept=case.value(name))
    solution = planner.solve(shares(planner, part)[0])
    assert not made_again(solution.expansion) & case.value(name)


@pytest.mark.parametrize("part", [0.6, 1.0])
def test_what_is_to_be_dropped_does_not_live_when_the_backward_starts(part: float) -> None:
    case = chain(6)
    dropped = case.value("a1", "a4")
    planner = Planner(case.problem(), dropped=dropped)
    solution = planner.solve(shares(planner, part)[0])
    assert not solution.expansion.live[0] & dropped


def test_no_plan_is_below_the_bound_of_a_search_that_has_not_begun() -> None:
    """Also where the eager run works in place (an in-place add), which a plan may do too."""
    case = residual(4)
    operations = [
        dataclasses.replace(each, overwrites=each.may_overwrite) if each.phase is Phase.FORWARD else each
        for each in case.graph.operations
    ]
    assert any(each.overwrites is not None for each in operations)
    graph = dataclasses.replace(case.graph, operations=tuple(operations))
    in_place_us = [time_us / 10 for time_us in case.costs.time_us]
    planner = Planner(Problem(graph, dataclasses.replace(case.costs, in_place_us=in_place_us)))
    solution = planner.solve(planner.unplanned.peak_bytes - A, time_limit_s=2.0)
    search = _Search(planner, planner.unplanned.peak_bytes, 1.0, None)
    assert search._least_us() <= planner.unplanned.extra_us + 1e-9 <= solution.expansion.extra_us + 2e-9


def test_where_everything_is_made_again_nothing_but_the_start_is_kept() -> None:
    planner = Planner(chain(6).problem())
    again = planner.all_again().expansion
    assert made_again(again).bit_count() >= 4
    assert again.forward_peaks[-1] < planner.unplanned.forward_peaks[-1]
