import itertools

import pytest
from handmade import Step, graph_of, graphs
from hypothesis import given
from hypothesis import strategies as st

from memfit.ir import Compute, Free, Graph, Kind, OptimizerMemory, Phase, Program
from memfit.plan.identity import identity_program
from memfit.plan.simulate import Timeline, simulate

BACKWARD = Phase.BACKWARD

# Two layers: sizes are powers of ten, so that every digit of a sum tells who is live.
LAYERS = graph_of(
    {
        "weight": (1, Kind.PARAMETER),
        "x": (10, Kind.BATCH),
        "hidden": (100, Kind.ACTIVATION),
        "out": (1_000, Kind.OUTPUT),
        "tangent": (10_000, Kind.TEMPORARY),
        "grad_hidden": (100_000, Kind.TEMPORARY),
        "grad_weight": (1_000_000, Kind.GRADIENT),
    },
    [
        Step("first", reads="weight x", makes="hidden"),
        Step("second", reads="hidden", makes="out"),
        Step("back_second", reads="tangent hidden", makes="grad_hidden", phase=BACKWARD),
        Step("back_first", reads="grad_hidden x", makes="grad_weight", phase=BACKWARD),
    ],
    resident="weight x",
    tangents="tangent",
    held="out grad_weight",
)


def live_bytes(timeline: Timeline) -> list[int]:
    return [moment.live_bytes for moment in timeline.moments]


def test_the_timeline_of_two_layers_is_this() -> None:
    timeline = simulate(LAYERS, identity_program(LAYERS))
    assert live_bytes(timeline) == [111, 1_111, 111_111, 1_101_011]
    assert timeline.resident_bytes == 11


def test_moments_say_what_runs_and_where() -> None:
    moments = simulate(LAYERS, identity_program(LAYERS)).moments
    assert [moment.label for moment in moments] == ["first", "second", "back_second", "back_first"]
    assert [moment.phase for moment in moments] == ["forward", "forward", "backward", "backward"]
    assert moments[0].module == "module.of.first"


def test_the_peak_is_told_by_kind_and_by_storage_biggest_first() -> None:
    timeline = simulate(LAYERS, identity_program(LAYERS))
    assert timeline.peak.label == "back_first"
    assert {kind: size for kind, size in timeline.peak.by_kind.items() if size} == {
        Kind.PARAMETER: 1,
        Kind.BATCH: 10,
        Kind.OUTPUT: 1_000,
        Kind.TEMPORARY: 100_000,
        Kind.GRADIENT: 1_000_000,
    }
    names = [LAYERS.storages[index].name for index in timeline.peak_storages]
    assert names == ["grad_weight", "grad_hidden", "out", "x", "weight"]


def test_a_workspace_counts_while_its_operation_runs_and_not_after() -> None:
    timeline = simulate(LAYERS, identity_program(LAYERS), workspace_bytes=[0, 5_000_000, 0, 0])
    assert live_bytes(timeline) == [111, 5_001_111, 111_111, 1_101_011]
    assert timeline.peak.by_kind[Kind.WORKSPACE] == 5_000_000


def test_an_overwritten_input_is_not_live_beside_the_output() -> None:
    graph = graph_of(
        {"a": (100, Kind.TEMPORARY), "b": (100, Kind.OUTPUT)},
        [Step("make", makes="a"), Step("relu_", reads="a", makes="b", overwrites="a")],
        held="b",
    )
    assert live_bytes(simulate(graph, identity_program(graph))) == [100, 100]


def test_new_buffer_values_are_gone_when_the_backward_starts() -> None:
    graph = graph_of(
        {"mean": (100, Kind.TEMPORARY), "out": (10, Kind.OUTPUT), "grad": (1, Kind.GRADIENT)},
        [Step("statistics", makes="mean out"), Step("back", makes="grad", phase=BACKWARD)],
        held="out grad",
        written_back="mean",
    )
    assert live_bytes(simulate(graph, identity_program(graph))) == [110, 11]


def test_an_unused_tangent_is_live_throughout_the_backward() -> None:
    graph = graph_of(
        {"out": (1, Kind.OUTPUT), "tangent": (100, Kind.TEMPORARY), "grad": (10, Kind.GRADIENT)},
        [Step("make", makes="out"), Step("back", makes="grad", phase=BACKWARD)],
        tangents="tangent",
        held="out grad",
    )
    assert live_bytes(simulate(graph, identity_program(graph))) == [1, 111]


def test_optimizer_state_is_always_live_and_its_workspace_only_in_its_step() -> None:
    optimizer = OptimizerMemory(state_bytes=20_000_000, workspace_bytes=300_000_000)
    timeline = simulate(LAYERS, identity_program(LAYERS), optimizer=optimizer)
    assert live_bytes(timeline) == [20_000_111, 20_001_111, 20_111_111, 21_101_011, 321_001_011]
    assert timeline.resident_bytes == 20_000_011
    assert (timeline.peak.label, timeline.peak.phase) == ("step", "optimizer")
    names = {LAYERS.storages[index].name for index in timeline.peak_storages}
    assert names == {"weight", "x", "out", "grad_weight"}


def test_an_optimizer_that_needs_nothing_adds_no_moment() -> None:
    program = identity_program(LAYERS)
    assert simulate(LAYERS, program, optimizer=OptimizerMemory()) == simulate(LAYERS, program)


def test_every_storage_is_rounded_up_by_itself() -> None:
    timeline = simulate(LAYERS, identity_program(LAYERS), granularity_bytes=512)
    assert timeline.resident_bytes == 2 * 512
    assert live_bytes(timeline)[:2] == [3 * 512, 3 * 512 + 1024]
    assert all(size % 512 == 0 for size in live_bytes(timeline))


def test_a_value_computed_again_is_live_again() -> None:
    program = Program(
        graph_digest=LAYERS.digest(),
        forward=(Compute(0), Compute(1), Free(2)),
        backward=(Compute(0), Compute(2), Free(2), Free(4), Compute(3), Free(5)),
    )
    timeline = simulate(LAYERS, program)
    assert [moment.label for moment in timeline.moments] == ["first", "second", "first", "back_second", "back_first"]
    assert live_bytes(timeline) == [111, 1_111, 11_111, 111_111, 1_101_011]


def test_the_first_of_two_equal_peaks_is_the_peak() -> None:
    graph = graph_of(
        {"a": (5, Kind.TEMPORARY), "b": (5, Kind.TEMPORARY)}, [Step("one", makes="a"), Step("two", makes="b")]
    )
    assert simulate(graph, identity_program(graph)).peak.label == "one"


def test_a_graph_without_operations_peaks_at_what_is_resident() -> None:
    graph = graph_of({"weight": (100, Kind.PARAMETER)}, [], resident="weight", held="weight")
    assert simulate(graph, identity_program(graph)).peak_bytes == 100


sizes = st.integers(min_value=0, max_value=1000)


@given(graphs(), st.lists(sizes, min_size=10, max_size=10), sizes, sizes)
def test_the_parts_of_the_peak_add_up(graph: Graph, workspaces: list[int], state: int, step: int) -> None:
    optimizer = OptimizerMemory(state_bytes=state, workspace_bytes=step)
    workspace_bytes = workspaces[: len(graph.operations)]
    timeline = simulate(graph, identity_program(graph), workspace_bytes=workspace_bytes, optimizer=optimizer)
    storages = sum(graph.storages[index].size_bytes for index in timeline.peak_storages)
    assert storages + state + timeline.peak.by_kind[Kind.WORKSPACE] == timeline.peak_bytes
    assert timeline.peak_bytes == sum(timeline.peak.by_kind.values()) == max(live_bytes(timeline))


@given(graphs())
def test_the_live_bytes_are_those_of_the_live_set(graph: Graph) -> None:
    assert live_bytes(simulate(graph, identity_program(graph))) == _by_last_use(graph)


def _by_last_use(graph: Graph) -> list[int]:
    """The same from intervals: a value is live from its maker to its last reader."""
    uses: dict[int, list[int]] = {}
    for position, operation in enumerate(graph.operations):
        for index in operation.outputs:
            uses.setdefault(index, []).append(position)
        for index in (*operation.inputs, *operation.outputs):
            uses.setdefault(index, []).append(_end_of_frame(graph, position))
    last = len(graph.operations) - 1
    backward_start = next(
        position for position, operation in enumerate(graph.operations) if operation.phase is Phase.BACKWARD
    )
    intervals = {}
    for index in range(len(graph.storages)):
        start, end = min(uses.get(index, [0])), max(uses.get(index, [last]))
        if index in graph.resident:
            start, end = 0, last
        elif index in graph.tangents:
            start = backward_start
        elif index in graph.held:
            end = last
        elif index in graph.written_back:
            end = backward_start - 1
        intervals[index] = (start, end)
    for position, operation in enumerate(graph.operations):
        if operation.overwrites is not None:
            intervals[operation.overwrites] = (intervals[operation.overwrites][0], position - 1)
    return [
        sum(graph.storages[index].size_bytes for index, (start, end) in intervals.items() if start <= position <= end)
        for position in range(last + 1)
    ]


def _end_of_frame(graph: Graph, position: int) -> int:
    frame = graph.operations[position].frame
    while frame is not None and position + 1 < len(graph.operations) and graph.operations[position + 1].frame == frame:
        position += 1
    return position


@given(graphs(), st.sampled_from([1, 2, 512]))
def test_more_granularity_or_more_of_anything_never_lowers_the_peak(graph: Graph, granularity_bytes: int) -> None:
    program = identity_program(graph)
    least = simulate(graph, program)
    rounded = simulate(graph, program, granularity_bytes=granularity_bytes)
    assert all(a <= b for a, b in itertools.zip_longest(live_bytes(least), live_bytes(rounded)))


@pytest.mark.parametrize("granularity_bytes", [1, 512])
def test_memory_returns_to_what_is_held(granularity_bytes: int) -> None:
    optimizer = OptimizerMemory(state_bytes=0, workspace_bytes=1)
    timeline = simulate(LAYERS, identity_program(LAYERS), optimizer=optimizer, granularity_bytes=granularity_bytes)
    kept = [LAYERS.storages[index].size_bytes for index in (*LAYERS.resident, *LAYERS.held)]
    rounded = sum(-(-size // granularity_bytes) * granularity_bytes for size in kept)
    assert timeline.moments[-1].live_bytes == rounded + 1
