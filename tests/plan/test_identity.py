from collections import Counter

from handmade import Step, graph_of, graphs
from hypothesis import given

from memfit.ir import Compute, Free, Graph, Kind, Phase
from memfit.plan.identity import identity_program

BACKWARD = Phase.BACKWARD


@given(graphs())
def test_every_operation_runs_once_in_its_order_and_its_pass(graph: Graph) -> None:
    program = identity_program(graph)
    for phase, instructions in ((Phase.FORWARD, program.forward), (BACKWARD, program.backward)):
        computed = [each.operation for each in instructions if isinstance(each, Compute)]
        expected = [index for index, operation in enumerate(graph.operations) if operation.phase is phase]
        assert computed == expected


@given(graphs())
def test_what_is_read_is_live_and_what_is_made_is_not_yet(graph: Graph) -> None:
    program = identity_program(graph)
    live = {*graph.resident}
    for instructions, arriving in ((program.forward, ()), (program.backward, graph.tangents)):
        live |= {*arriving}
        for instruction in instructions:
            if isinstance(instruction, Free):
                live.remove(instruction.storage)
                continue
            operation = graph.operations[instruction.operation]
            assert {*operation.inputs} <= live
            assert not {*operation.outputs} & live
            live |= {*operation.outputs}
            live -= {operation.overwrites}


@given(graphs())
def test_every_storage_made_is_freed_exactly_once_or_held(graph: Graph) -> None:
    program = identity_program(graph)
    gone = Counter(each.storage for each in (*program.forward, *program.backward) if isinstance(each, Free))
    gone.update(operation.overwrites for operation in graph.operations if operation.overwrites is not None)
    made = {index for operation in graph.operations for index in operation.outputs}
    assert {storage: gone[storage] for storage in made} == {storage: int(storage not in graph.held) for storage in made}


@given(graphs())
def test_what_exists_before_the_step_is_never_freed(graph: Graph) -> None:
    program = identity_program(graph)
    freed = {each.storage for each in (*program.forward, *program.backward) if isinstance(each, Free)}
    assert not freed & {*graph.resident, *graph.held}


@given(graphs())
def test_the_program_names_its_graph_and_is_the_same_every_time(graph: Graph) -> None:
    program = identity_program(graph)
    assert program.graph_digest == graph.digest()
    assert program == identity_program(graph)


def test_a_value_goes_right_after_its_last_use() -> None:
    graph = graph_of(
        {"x": (1, Kind.BATCH), "a": (1, Kind.TEMPORARY), "b": (1, Kind.OUTPUT)},
        [Step("first", reads="x", makes="a"), Step("second", reads="a", makes="b")],
        resident="x",
        held="b",
    )
    assert identity_program(graph).forward == (Compute(0), Compute(1), Free(1))


def test_a_value_nothing_reads_goes_at_once() -> None:
    graph = graph_of(
        {"a": (1, Kind.TEMPORARY), "b": (1, Kind.OUTPUT)},
        [Step("first", makes="a b")],
        held="b",
    )
    assert identity_program(graph).forward == (Compute(0), Free(0))


def test_what_is_overwritten_is_not_freed_as_well() -> None:
    graph = graph_of(
        {"a": (1, Kind.TEMPORARY), "b": (1, Kind.OUTPUT)},
        [Step("first", makes="a"), Step("second", reads="a", makes="b", overwrites="a")],
        held="b",
    )
    assert identity_program(graph).forward == (Compute(0), Compute(1, in_place=True))


def test_what_a_frame_reads_and_makes_lasts_until_it_ends() -> None:
    graph = graph_of(
        dict.fromkeys(["tangent", "a", "b", "c"], (1, Kind.TEMPORARY)),
        [
            Step("one", reads="tangent", makes="a", phase=BACKWARD, frame=7),
            Step("two", reads="a", makes="b", phase=BACKWARD, frame=7),
            Step("three", reads="b", makes="c", phase=BACKWARD, frame=8),
        ],
        tangents="tangent",
        held="c",
    )
    assert identity_program(graph).backward == (Compute(0), Compute(1), Free(0), Free(1), Compute(2), Free(2))


def test_operations_that_are_no_neighbours_are_two_frames() -> None:
    graph = graph_of(
        dict.fromkeys(["tangent", "a", "b", "c"], (1, Kind.TEMPORARY)),
        [
            Step("one", reads="tangent", makes="a", phase=BACKWARD, frame=7),
            Step("two", makes="b", phase=BACKWARD),
            Step("three", reads="a b", makes="c", phase=BACKWARD, frame=7),
        ],
        tangents="tangent",
        held="c",
    )
    assert identity_program(graph).backward == (Compute(0), Free(0), Compute(1), Compute(2), Free(1), Free(2))


CHECKPOINTED = graph_of(
    {
        "x": (1, Kind.BATCH),
        "a": (10, Kind.ACTIVATION),
        "b": (100, Kind.ACTIVATION),
        "out": (1_000, Kind.OUTPUT),
        "tangent": (10_000, Kind.TEMPORARY),
        "grad": (100_000, Kind.GRADIENT),
    },
    [
        Step("first", reads="x", makes="a", checkpoint=0),
        Step("second", reads="a", makes="b", checkpoint=0),
        Step("third", reads="b", makes="out", checkpoint=0),
        Step("back", reads="tangent a b", makes="grad", phase=BACKWARD, checkpoint=0),
    ],
    resident="x",
    tangents="tangent",
    held="out grad",
)


def test_values_inside_a_checkpoint_are_dropped_in_the_forward() -> None:
    forward = identity_program(CHECKPOINTED).forward
    assert forward == (Compute(0), Compute(1), Free(1), Compute(2), Free(2))


def test_the_backward_computes_a_checkpoint_again_up_to_what_it_needs() -> None:
    backward = identity_program(CHECKPOINTED).backward
    assert [each.operation for each in backward if isinstance(each, Compute)] == [0, 1, 3]
    assert {each.storage for each in backward if isinstance(each, Free)} == {1, 2, 4}


def test_new_buffer_values_last_until_the_forward_ends() -> None:
    graph = graph_of(
        {"mean": (1, Kind.TEMPORARY), "out": (1, Kind.OUTPUT), "grad": (1, Kind.GRADIENT)},
        [Step("statistics", makes="mean"), Step("apply", makes="out"), Step("back", makes="grad", phase=BACKWARD)],
        held="out grad",
        written_back="mean",
    )
    assert identity_program(graph).forward == (Compute(0), Compute(1), Free(0))


def test_a_new_buffer_value_that_the_backward_reads_is_there_when_it_does() -> None:
    graph = graph_of(
        {"scale": (1, Kind.ACTIVATION), "out": (1, Kind.OUTPUT), "grad": (1, Kind.GRADIENT)},
        [
            Step("update", makes="scale"),
            Step("apply", reads="scale", makes="out"),
            Step("back", reads="scale", makes="grad", phase=BACKWARD),
        ],
        held="out grad",
        written_back="scale",
    )
    program = identity_program(graph)
    assert Free(0) not in program.forward
    assert program.backward == (Compute(2), Free(0))
