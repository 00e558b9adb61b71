"""A choice of live values comes to a valid program, and its bytes and microseconds are those of the simulator."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
import pytest
from exhaustive import own_time_us
from handmade import KIB, Case, Features, Layer, Step, case_of, training, trainings
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.ir import Compute, Free, Graph, Instruction, Kind, Phase, Program
from memfit.plan.choice import everything_kept
from memfit.plan.expand import Expander, Expansion, expand, program_of
from memfit.plan.identity import identity_program
from memfit.plan.simulate import simulate

A, B, C = 100 * KIB, 200 * KIB, 400 * KIB
PLAIN = Features(several_outputs=True, workspaces=True, in_place=True)


@st.composite
def choices(draw: st.DrawFn, features: Features) -> tuple[Case, list[int], dict[int, int]]:
    """A model, values to have at each backward turn, and some to make early."""
    case = draw(trainings(features))
    problem = case.problem()
    sets = st.integers(0, 2 ** len(problem.storages) - 1)
    wanted = [draw(sets) for _ in problem.backward]
    packed = sum(1 << number for number in problem.packers)  # these cannot be made again
    early = draw(st.dictionaries(st.integers(0, len(wanted) - 1), sets.map(lambda each: each & ~packed), max_size=2))
    return case, wanted, early


def check(case: Case, wanted: Sequence[int], early: dict[int, int]) -> None:
    problem = case.problem()
    expansion = Expander(problem).expand(wanted, early)
    program = program_of(problem, expansion)
    assert_valid(case.graph, program)
    assert_as_simulated(case, expansion, program)
    assert expansion.extra_us == pytest.approx(time_us(case, program) - own_time_us(case.graph, case.costs))


def assert_valid(graph: Graph, program: Program) -> None:
    """What is read is live, what is made was not, own operations run once in order, in the end what is held is left."""
    live = Counter(graph.resident)
    for phase, instructions in ((Phase.FORWARD, program.forward), (Phase.BACKWARD, program.backward)):
        own = [index for index, operation in enumerate(graph.operations) if operation.phase is phase]
        outputs = [graph.operation(each.operation).outputs for each in computed(instructions)]
        if phase is Phase.BACKWARD:
            live.update(graph.tangents)
            makers = [graph.operation(each.operation) for each in computed(instructions)]
            outputs = [each.outputs for each in makers if each.phase is phase]
            assert outputs == [graph.operations[index].outputs for index in own]
        else:
            assert [each.operation for each in computed(instructions) if each.operation < len(graph.operations)] == own
        for instruction in instructions:
            _step(graph, live, instruction)
        if phase is Phase.FORWARD:
            read = {storage for operation in graph.operations for storage in operation.inputs}
            assert all(not live[each] for each in graph.written_back if each not in read)
    unread = {*graph.tangents} - {storage for operation in graph.operations for storage in operation.inputs}
    assert +live == Counter((*graph.resident, *graph.held, *unread))


def _step(graph: Graph, live: Counter[int], instruction: Instruction) -> None:
    if isinstance(instruction, Free):
        assert live[instruction.storage] >= 1
        live[instruction.storage] -= 1
        return
    operation = graph.operation(instruction.operation)
    assert all(live[storage] >= 1 for storage in operation.inputs)
    if instruction.in_place:
        assert operation.may_overwrite is not None
        live[operation.may_overwrite] = 0
    live.update(operation.outputs)  # only of what is held may there be a second copy for a while
    assert all(live[storage] == 1 or storage in graph.held for storage in operation.outputs)


def computed(instructions: Sequence[Instruction]) -> list[Compute]:
    return [each for each in instructions if isinstance(each, Compute)]


def assert_as_simulated(case: Case, expansion: Expansion, program: Program) -> None:
    workspace_bytes = case.costs.workspace_bytes
    moments = iter(simulate(case.graph, program, workspace_bytes=workspace_bytes).moments)

    def highest(runs: Sequence[Sequence[object]]) -> Iterator[int]:
        for ways in runs:
            yield max(next(moments).live_bytes for _ in ways)

    assert list(highest(expansion.forward)) == expansion.forward_peaks
    assert list(highest(expansion.backward)) == expansion.peaks


def time_us(case: Case, program: Program) -> float:
    costs = case.costs
    return sum(
        costs.in_place_us[each.operation] if each.in_place else costs.time_us[each.operation]
        for each in computed((*program.forward, *program.backward))
    )


@given(choices(PLAIN))
def test_any_choice_is_a_valid_program_that_costs_what_is_said(choice: tuple[Case, list[int], dict[int, int]]) -> None:
    check(*choice)


@given(choices(Features(several_outputs=True, in_place=True, in_place_backward=True, in_place_is_faster=True)))
def test_so_is_one_that_works_in_place(choice: tuple[Case, list[int], dict[int, int]]) -> None:
    check(*choice)


@settings(phases=[hypothesis.Phase.generate])
@given(choices(Features(buffers=True)))
def test_so_is_one_with_buffers(choice: tuple[Case, list[int], dict[int, int]]) -> None:
    check(*choice)


@given(choices(Features(alternatives=True, workspaces=True)))
def test_so_is_one_with_alternatives(choice: tuple[Case, list[int], dict[int, int]]) -> None:
    check(*choice)


@given(trainings(PLAIN))
def test_if_everything_is_kept_it_is_the_eager_run(case: Case) -> None:
    problem = case.problem()
    program = program_of(problem, expand(problem, everything_kept(problem)))
    assert [each.operation for each in computed(program.forward + program.backward)] == list(
        range(len(case.graph.operations))
    )
    assert simulate(case.graph, program).peak_bytes <= simulate(case.graph, identity_program(case.graph)).peak_bytes


def two_layers(size_bytes: int) -> Any:
    return training(
        {"a": A, "b": size_bytes, "out": C},
        [
            Layer(Step("first", reads="x", makes="a", time_us=5.0), saves="x"),
            Layer(Step("second", reads="a", makes="b", time_us=7.0, may_overwrite="a", in_place_us=6.0), saves="a"),
            Layer(Step("third", reads="b", makes="out"), saves="b"),
        ],
    )


TWO_LAYERS = two_layers(B)


def test_a_value_nobody_kept_is_made_again_from_what_was() -> None:
    problem = TWO_LAYERS.problem()
    expansion = expand(problem, [TWO_LAYERS.value("a"), TWO_LAYERS.value("a"), 0])
    again = [[TWO_LAYERS.graph.operation(way.operation).name for way in ways] for ways in expansion.backward]
    assert again == [["second", "back_third"], ["back_second"], ["back_first"]]
    assert expansion.extra_us == 7.0


@pytest.mark.parametrize(("size_bytes", "in_place"), [(A, True), (B, False)])
def test_what_is_dropped_in_the_forward_is_overwritten_there_by_what_is_as_big(size_bytes, in_place) -> None:
    training = two_layers(size_bytes)
    problem = training.problem()
    expansion = expand(problem, [training.value("b"), 0, 0])
    assert Compute(1, in_place=in_place) in program_of(problem, expansion).forward
    assert expansion.extra_us == 5.0 + (6.0 - 7.0 if in_place else 0.0)


def test_the_cheapest_way_makes_a_value_again() -> None:
    case = training(
        {"a": A, "out": B},
        [
            Layer(Step("first", reads="x", makes="a", time_us=9.0)),
            Layer(Step("second", reads="a", makes="out"), saves="a"),
        ],
        alternatives=[Step("again", reads="x", makes="a", time_us=4.0)],
    )
    assert expand(case.problem(), [0, 0]).extra_us == 4.0


BITS = training(
    {"a": C, "mask": C, "out": A, "mask_bits": A},
    [
        Layer(Step("first", reads="x", makes="a", time_us=9.0)),
        Layer(Step("compare", reads="a", makes="mask", time_us=3.0)),
        Layer(Step("last", reads="mask", makes="out"), saves="mask"),
    ],
    alternatives=[
        Step("pack", reads="mask", makes="mask_bits", time_us=1.0),
        Step("unpack", reads="mask_bits", makes="mask", time_us=2.0),
    ],
)


def test_a_packed_form_is_made_right_after_its_value_and_only_if_kept() -> None:
    problem = BITS.problem()
    expansion = expand(problem, [BITS.value("mask_bits"), 0, 0])
    runs = [[BITS.graph.operation(way.operation).name for way in ways] for ways in expansion.forward]
    assert runs == [["first"], ["compare", "pack"], ["last"]]
    assert [BITS.graph.operation(way.operation).name for way in expansion.backward[0]] == ["unpack", "back_last"]
    assert expansion.extra_us == 3.0
    assert all(len(ways) == 1 for ways in expand(problem, everything_kept(problem)).forward)


def test_without_its_packed_form_a_value_is_made_the_long_way() -> None:
    assert expand(BITS.problem(), [0, 0, 0]).extra_us == 12.0


def test_the_cost_of_a_value_is_that_of_the_way_there_is() -> None:
    expander = Expander(BITS.problem())
    assert expander.cost(BITS.value("mask"), 0) == 12.0
    assert expander.cost(BITS.value("mask"), BITS.value("mask_bits")) == 2.0


def test_a_lean_backward_is_taken_when_the_plain_one_has_nothing_to_read() -> None:
    case = training(
        {"mask": C, "out": A, "mask_bits": A},
        [
            Layer(Step("first", reads="x", makes="mask", time_us=9.0)),
            Layer(Step("last", reads="mask", makes="out"), saves="mask", lean_saves="mask_bits", lean_us=3.0),
        ],
        alternatives=[Step("pack", reads="mask", makes="mask_bits", time_us=1.0)],
    )
    expansion = expand(case.problem(), [case.value("mask_bits"), 0])
    assert [case.graph.operation(way.operation).name for way in expansion.backward[0]] == ["lean_last"]
    assert expansion.extra_us == 1.0 + 2.0


def test_what_is_made_early_is_there_though_read_later_only() -> None:
    case = training(
        {"a": A, "b": B, "out": C},
        [
            Layer(Step("first", reads="x", makes="a"), saves="a"),
            Layer(Step("second", reads="a", makes="b")),
            Layer(Step("third", reads="b", makes="out"), saves="b"),
        ],
    )
    a, b = case.value("a"), case.value("b")
    expansion = Expander(case.problem()).expand([b, a, a], {1: a})
    assert [case.graph.operation(way.operation).name for way in expansion.backward[1]] == ["first", "back_second"]
    assert expansion.live == [b, 0, a]


def test_the_area_over_a_budget_is_the_sum_over_all_turns() -> None:
    expansion = Expansion([], [], [], 0.0, forward_peaks=[5, 12], peaks=[20, 3], highest=[0, 0])
    assert expansion.over(10) == 2 + 10
    assert expansion.peak_bytes == 20


def test_an_operation_whose_other_output_is_held_can_run_again() -> None:
    case = training(
        {"out": B, "statistics": C},
        [Layer(Step("only", reads="x", makes="out statistics", time_us=5.0), saves="statistics")],
    )
    check(case, [0], {})


def test_a_tangent_is_not_overwritten() -> None:
    case = case_of(
        {
            "x": (A, Kind.BATCH),
            "out": (A, Kind.OUTPUT),
            "tangent": (A, Kind.TEMPORARY),
            "grad": (A, Kind.GRADIENT),
        },
        [
            Step("forward", reads="x", makes="out"),
            Step("back", reads="tangent x", makes="grad", may_overwrite="tangent", phase=Phase.BACKWARD),
        ],
        resident="x",
        tangents="tangent",
        held="out grad",
    )
    check(case, [0], {})


def test_the_eager_run_takes_nothing_extra_if_it_overwrites_a_gradient() -> None:
    case = case_of(
        {"x": (A, Kind.BATCH), "out": (A, Kind.OUTPUT), "g": (A, Kind.TEMPORARY), "grad": (A, Kind.GRADIENT)},
        [
            Step("forward", reads="x", makes="out"),
            Step("back", reads="x", makes="g", phase=Phase.BACKWARD),
            Step("add_", reads="g", makes="grad", overwrites="g", phase=Phase.BACKWARD, time_us=5.0, in_place_us=2.0),
        ],
        resident="x",
        held="out grad",
    )
    check(case, [0, 0], {})


def test_a_packed_form_is_made_after_its_value_even_if_that_is_held() -> None:
    case = training(
        {"a": A, "out": B, "out_bits": A},
        [
            Layer(Step("first", reads="x", makes="a")),
            Layer(Step("last", reads="a", makes="out"), saves="out", lean_saves="out_bits"),
        ],
        alternatives=[Step("pack", reads="out", makes="out_bits")],
    )
    check(case, [case.value("out_bits"), 0], {})
