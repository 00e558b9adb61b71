"""Programs that cannot run are refused, those that can are not."""

import dataclasses

import pytest
from handmade import graphs
from handmade_plan import chain, program_dropping
from hypothesis import given

from memfit.errors import InvalidFile
from memfit.ir import Compute, Free, Graph, Program
from memfit.plan.identity import identity_program
from memfit.plan.validate import check_program

CASE = chain("a", "b", "c")
PROGRAM = program_dropping(CASE, "b")


@given(graphs())
def test_the_eager_run_can_run(graph: Graph) -> None:
    check_program(graph, identity_program(graph))


def test_a_program_that_computes_again_can_run() -> None:
    check_program(CASE.graph, PROGRAM)


def without(program: Program, part: str, place: int) -> Program:
    instructions = list(getattr(program, part))
    del instructions[place]
    return dataclasses.replace(program, **{part: tuple(instructions)})


def place_of(instructions: tuple[Compute | Free, ...], name: str) -> int:
    index = [each.name for each in CASE.graph.operations].index(name)
    return next(n for n, each in enumerate(instructions) if isinstance(each, Compute) and each.operation == index)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_forward_operation_cannot_be_left_out(name: str) -> None:
    with pytest.raises(InvalidFile, match="plan again"):
        check_program(CASE.graph, without(PROGRAM, "forward", place_of(PROGRAM.forward, name)))


@pytest.mark.parametrize("name", ["back_a", "back_b", "back_c", "b"])
def test_a_backward_operation_cannot_be_left_out(name: str) -> None:
    with pytest.raises(InvalidFile, match="plan again"):
        check_program(CASE.graph, without(PROGRAM, "backward", place_of(PROGRAM.backward, name)))


def test_what_is_freed_must_be_there() -> None:
    free = next(each for each in PROGRAM.backward if isinstance(each, Free))
    with pytest.raises(InvalidFile, match="frees what is not there"):
        check_program(CASE.graph, dataclasses.replace(PROGRAM, backward=(*PROGRAM.backward, free)))


def test_what_is_held_must_not_be_freed() -> None:
    program = dataclasses.replace(PROGRAM, backward=(*PROGRAM.backward, Free(CASE.graph.held[0])))
    with pytest.raises(InvalidFile, match="never makes"):
        check_program(CASE.graph, program)


def test_operations_that_do_not_exist_are_refused() -> None:
    program = dataclasses.replace(PROGRAM, forward=(*PROGRAM.forward, Compute(99)))
    with pytest.raises(InvalidFile, match="operation 99 of 6"):
        check_program(CASE.graph, program)


def test_what_cannot_work_in_place_is_refused() -> None:
    place = place_of(PROGRAM.forward, "a")
    forward = list(PROGRAM.forward)
    forward[place] = Compute(forward[place].operation, in_place=True)
    with pytest.raises(InvalidFile, match="in place, which it cannot"):
        check_program(CASE.graph, dataclasses.replace(PROGRAM, forward=tuple(forward)))


def test_an_empty_program_is_refused() -> None:
    with pytest.raises(InvalidFile):
        check_program(CASE.graph, Program(graph_digest=CASE.graph.digest(), forward=(), backward=()))
