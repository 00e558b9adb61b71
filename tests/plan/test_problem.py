import dataclasses

from handmade import KIB, Case, Layer, Step, case_of, graph_of, names_of, training

from memfit.ir import ACCUMULATE, Graph, Kind, OptimizerMemory, Phase
from memfit.plan.problem import Problem, handed_out_together, numbers

BACKWARD = Phase.BACKWARD
A = 100 * KIB

# One layer with a mask that can be kept in bits, a lean backward, a cheaper way and a new value of a buffer.
CASE = training(
    {"a": 4 * A, "mask": 2 * A, "mean": A, "b": 4 * A, "out": A, "mask_bits": A // 2},
    [
        Layer(Step("linear", reads="x", makes="a", time_us=20.0)),
        Layer(Step("compare", reads="a", makes="mask mean", time_us=3.0)),
        Layer(
            Step("select", reads="a mask", makes="b", time_us=4.0, may_overwrite="a", in_place_us=2.0),
            saves="mask",
            lean_saves="mask_bits",
            lean_us=5.0,
        ),
        Layer(Step("head", reads="b", makes="out", workspace_bytes=A), saves="b"),
    ],
    alternatives=[
        Step("pack", reads="mask", makes="mask_bits", time_us=1.0),
        Step("unpack", reads="mask_bits", makes="mask", time_us=2.0),
        Step("again", reads="a mask", makes="b", time_us=3.0),
    ],
    written_back="mean",
)


def name_of(case: Case, operation: int) -> str:
    return case.graph.operation(operation).name


def number(name: str) -> int:
    return CASE.value(name).bit_length() - 1


def test_numbers_of_a_set_come_smallest_first() -> None:
    assert list(numbers(0b101001)) == [0, 3, 5]
    assert list(numbers(0)) == []


def test_what_is_decided_about_is_made_by_the_forward_and_not_held() -> None:
    problem = CASE.problem()
    assert names_of(problem, 2 ** len(problem.storages) - 1) == ["a", "mask", "mean", "b", "mask_bits"]
    assert problem.size_of(CASE.value("a", "mean")) == 5 * A


def test_values_that_do_not_matter_together_are_not_decided_about() -> None:
    sizes = {"big": 1000 * KIB, "tiny": KIB, "little": KIB, "out": A}
    layers = [
        Layer(Step("first", reads="x", makes="big tiny little"), saves="big tiny little"),
        Layer(Step("last", reads="big", makes="out")),
    ]
    problem = training(sizes, layers).problem()
    assert names_of(problem, 2 ** len(problem.storages) - 1) == ["big"]
    more = training(sizes | {"tiny": 3 * KIB}, layers).problem()
    assert names_of(more, 2 ** len(more.storages) - 1) == ["big", "tiny"]


def test_values_that_are_not_decided_about_live_to_the_end() -> None:
    case = training(
        {"big": 1000 * KIB, "tiny": KIB, "out": A},
        [Layer(Step("first", reads="x", makes="big tiny")), Layer(Step("last", reads="big tiny", makes="out"))],
    )
    first, last = case.problem().forward
    assert last.before_bytes - first.before_bytes == KIB


def test_a_value_is_made_by_the_models_own_operation_first_and_by_alternatives() -> None:
    problem = CASE.problem()
    ways = [[name_of(CASE, way.operation) for way in makers] for makers in problem.makers]
    assert ways == [["linear"], ["compare", "unpack"], ["compare"], ["select", "again"], []]


def test_a_packed_form_is_made_right_after_its_value_and_cannot_be_made_again() -> None:
    problem = CASE.problem()
    packed = number("mask_bits")
    assert {each: name_of(CASE, way.operation) for each, way in problem.packers.items()} == {packed: "pack"}
    assert problem.first_made[packed] == problem.last_read[packed] == 1
    assert problem.rank_of[number("mask")] < problem.rank_of[packed] < problem.rank_of[number("b")]


def test_alternatives_run_where_the_value_they_make_belongs() -> None:
    problem = CASE.problem()
    own, unpack = problem.makers[number("mask")]
    assert unpack.rank == own.rank


def test_a_way_says_what_it_reads_makes_takes_and_takes_over() -> None:
    select = CASE.problem().forward[2].ways[0]
    assert (select.needs, select.makes) == (CASE.value("a", "mask"), CASE.value("b"))
    assert (select.time_us, select.in_place_us) == (4.0, 2.0)
    assert select.overwrites == CASE.value("a")
    assert CASE.problem().forward[3].ways[0].workspace_bytes == A


def test_values_live_in_the_forward_from_their_maker_to_their_last_reader_there() -> None:
    problem = CASE.problem()
    lives = list(zip(problem.first_made, problem.last_read, strict=True))
    assert lives[:2] == [(0, 2), (1, 2)]
    assert lives[number("mean")] == (1, 3), "a new value of a buffer lives until the forward ends"
    assert lives[number("b")] == (2, 3)


def test_other_ways_of_a_backward_operation_belong_to_its_turn() -> None:
    ways = [[name_of(CASE, way.operation) for way in turn.ways] for turn in CASE.problem().backward]
    assert ["back_select", "lean_select"] in ways
    assert sum(len(each) for each in ways) == len(ways) + 1


LAYERS = case_of(
    {
        "weight": (A, Kind.PARAMETER),
        "x": (2 * A, Kind.BATCH),
        "hidden": (4 * A, Kind.ACTIVATION),
        "out": (8 * A, Kind.OUTPUT),
        "tangent": (16 * A, Kind.TEMPORARY),
        "grad_hidden": (32 * A, Kind.TEMPORARY),
        "masked": (32 * A, Kind.TEMPORARY),
        "grad_weight": (64 * A, Kind.GRADIENT),
    },
    [
        Step("first", reads="weight x", makes="hidden", time_us=1.0),
        Step("second", reads="hidden", makes="out", time_us=2.0),
        Step("back_second", reads="tangent hidden", makes="grad_hidden", phase=BACKWARD, time_us=4.0),
        Step(
            "mask_",
            reads="grad_hidden",
            makes="masked",
            phase=BACKWARD,
            overwrites="grad_hidden",
            time_us=8.0,
            in_place_us=5.0,
        ),
        Step("back_first", reads="masked x", makes="grad_weight", phase=BACKWARD, time_us=16.0),
    ],
    resident="weight x",
    tangents="tangent",
    held="out grad_weight",
)


def test_levels_count_everything_but_the_values() -> None:
    problem = LAYERS.problem()
    levels = [(turn.before_bytes // A, turn.during_bytes // A) for turn in (*problem.forward, *problem.backward)]
    assert levels == [(3, 3), (3, 11), (27, 59), (43, 43), (43, 107)]


def test_the_models_own_time_counts_what_it_does_in_place_as_such() -> None:
    assert LAYERS.problem().own_time_us == 1.0 + 2.0 + 4.0 + 5.0 + 16.0


def test_every_storage_is_rounded_up_to_the_granularity() -> None:
    graph = graph_of(
        {"x": (1, Kind.BATCH), "a": (1000, Kind.ACTIVATION), "out": (513, Kind.OUTPUT)},
        [Step("first", reads="x", makes="a"), Step("second", reads="a", makes="out")],
        resident="x",
        held="out",
    )
    problem = Problem(graph, LAYERS.costs, granularity_bytes=512)
    assert problem.sizes == [1024]
    assert problem.forward[1].during_bytes == 512 + 1024


def test_optimizer_state_is_always_there() -> None:
    optimizer = OptimizerMemory(state_bytes=7 * A)
    problem = Problem(LAYERS.graph, LAYERS.costs, optimizer=optimizer)
    assert problem.forward[0].before_bytes == LAYERS.problem().forward[0].before_bytes + 7 * A


def accumulating() -> Graph:
    """A parameter with two gradients and one with a single one, as autograd makes them in between."""
    names = ["w", "v", "tangent", "g1", "g2", "gw", "gv", "t"]
    graph = graph_of(
        {name: (A, Kind.PARAMETER if name in "wv" else Kind.TEMPORARY) for name in names},
        [
            Step("one", reads="tangent w", makes="g1", phase=BACKWARD, frame=1),
            Step("copy", reads="g1", makes="gv", phase=BACKWARD),
            Step("two", reads="tangent v", makes="g2 t", phase=BACKWARD, checkpoint=2),
            Step("sum", reads="g2 t", makes="gw", phase=BACKWARD),
        ],
        resident="w v",
        tangents="tangent",
        held="gw gv",
    )
    operations = [
        dataclasses.replace(each, target=ACCUMULATE) if each.name in ("copy", "sum") else each
        for each in graph.operations
    ]
    trained = ((names.index("w"), names.index("gw")), (names.index("v"), names.index("gv")))
    return dataclasses.replace(graph, operations=tuple(operations), trained=trained)


def test_gradients_that_leave_together_are_made_last() -> None:
    graph = handed_out_together(accumulating())
    assert [each.name for each in graph.operations] == ["one", "two", "copy", "sum"]
    assert all(each.frame is None and each.checkpoint is None for each in graph.operations)


def test_the_sum_of_two_gradients_is_written_over_the_first() -> None:
    *_, copy, total = handed_out_together(accumulating()).operations
    assert copy.overwrites is None
    assert total.overwrites == total.may_overwrite == total.inputs[0]


def test_a_sum_is_not_written_over_what_is_itself_a_gradient() -> None:
    graph = accumulating()
    *others, total = graph.operations
    (_, gradient) = graph.trained[1]
    changed = dataclasses.replace(total, inputs=(gradient, total.inputs[1]))
    graph = dataclasses.replace(graph, operations=(*others, changed))
    assert handed_out_together(graph).operations[-1].overwrites is None


def test_a_graph_without_accumulation_is_the_same_but_for_frames() -> None:
    assert handed_out_together(LAYERS.graph) == LAYERS.graph
