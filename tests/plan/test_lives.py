import pytest
from handmade import Step, graph_of, graphs
from handmade_plan import chain, program_dropping
from hypothesis import given

from memfit.ir import Compute, Free, Kind, OptimizerMemory, Phase, Program
from memfit.plan.identity import identity_program
from memfit.plan.lives import course_of
from memfit.plan.simulate import simulate


def live_bytes(graph, course):
    """Added up anew from the lives alone."""
    return [
        sum(graph.storages[life.storage].size_bytes for life in course.lives if life.start <= moment < life.stop)
        for moment in range(len(course.runs))
    ]


@given(graphs())
def test_lives_add_up_to_what_the_simulator_says(graph):
    program = identity_program(graph)
    timeline = simulate(graph, program)
    assert live_bytes(graph, course_of(graph, program)) == [moment.live_bytes for moment in timeline.moments]


@pytest.mark.parametrize("dropped", [(), ("a",), ("b",), ("a", "b", "c")])
def test_lives_of_a_planned_step_add_up_too(dropped):
    case = chain("a", "b", "c", "d")
    program = program_dropping(case, *dropped)
    timeline = simulate(case.graph, program)
    course = course_of(case.graph, program)
    assert live_bytes(case.graph, course) == [moment.live_bytes for moment in timeline.moments]
    assert [case.graph.operation(run.operation).name for run in course.runs] == [m.label for m in timeline.moments]


def test_what_is_dropped_lives_twice_and_says_so():
    case = chain("a", "b", "c", "d")
    names = [each.name for each in case.graph.storages]
    course = course_of(case.graph, program_dropping(case, "b"))
    first, second = [life for life in course.lives if names[life.storage] == "b"]
    assert (first.is_again, second.is_again) == (False, True)
    assert first.stop < second.start
    assert [run.is_again for run in course.runs].count(True) == 1


def test_what_is_written_over_ends_where_its_successor_starts():
    graph = graph_of(
        {"x": (1, Kind.BATCH), "a": (10, Kind.ACTIVATION), "b": (10, Kind.ACTIVATION)},
        [Step("first", reads="x", makes="a"), Step("second", reads="a", makes="b", overwrites="a")],
        resident="x",
    )
    program = Program(graph_digest="", forward=(Compute(0), Compute(1, True), Free(2)), backward=())
    lives = {life.storage: (life.start, life.stop) for life in course_of(graph, program).lives}
    assert lives == {0: (0, 2), 1: (0, 1), 2: (1, 2)}


def test_the_step_of_an_optimizer_is_a_moment():
    case = chain("a", "b")
    program = identity_program(case.graph)
    plain, stepped = (course_of(case.graph, program, each) for each in (None, OptimizerMemory(state_bytes=8)))
    assert len(stepped.runs) == len(plain.runs) + 1
    assert stepped.runs[-1].phase == "optimizer"
    assert {run.phase for run in plain.runs} == {Phase.FORWARD, Phase.BACKWARD}


def test_a_program_that_frees_what_is_not_there_cannot_be_followed():
    case = chain("a")
    with pytest.raises(IndexError):
        course_of(case.graph, Program(graph_digest="", forward=(Free(1),), backward=()))
