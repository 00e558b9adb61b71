"""Requests of a step add up to what the simulator says, and reserve what an allocator makes of them."""

import dataclasses

import pytest
from handmade import Step as Op
from handmade import graph_of, graphs
from hypothesis import given

from memfit.ir import Compute, Free, Kind, LossMemory, OptimizerMemory, Phase, Program
from memfit.plan.allocator.requests import Allocate, Release, run_requests
from memfit.plan.identity import identity_program
from memfit.plan.loop import with_kept_gradients, with_kept_outputs
from memfit.plan.reserved import reserved_memory
from memfit.plan.simulate import simulate
from memfit.plan.step_requests import step_requests

MIB = 2**20
MOMENTUM = OptimizerMemory(state_bytes=70 * MIB, workspace_bytes=30 * MIB)


def peak_bytes(requests):
    """What an allocator without rounding would peak at; everything that is released was there."""
    live, highest = {}, 0
    for request in requests:
        if isinstance(request, Allocate):
            assert request.handle not in live
            live[request.handle] = request.size_bytes
        else:
            del live[request.handle]
        highest = max(highest, sum(live.values()))
    return highest


def small_step():
    graph = graph_of(
        {
            "weight": (40 * MIB, Kind.PARAMETER),
            "x": (8 * MIB, Kind.BATCH),
            "hidden": (24 * MIB, Kind.ACTIVATION),
            "activated": (24 * MIB, Kind.ACTIVATION),
            "out": (3 * MIB, Kind.OUTPUT),
            "tangent": (3 * MIB, Kind.TEMPORARY),
            "gradient": (40 * MIB, Kind.GRADIENT),
        },
        [
            Op("linear", reads="weight x", makes="hidden", workspace_bytes=5 * MIB),
            Op("relu", reads="hidden", makes="activated", overwrites="hidden"),
            Op("head", reads="activated", makes="out"),
            Op("back", reads="tangent activated", makes="gradient", phase=Phase.BACKWARD),
        ],
        resident="weight x",
        tangents="tangent",
        held="out gradient",
    )
    return dataclasses.replace(graph, trained=((0, 6),))


@given(graphs())
def test_requests_peak_where_the_simulator_does(graph):
    program = identity_program(graph)
    workspaces = [17 * index for index in range(len(graph.operations))]
    for optimizer in (None, OptimizerMemory(state_bytes=500, workspace_bytes=90)):
        requests = step_requests(graph, program, workspace_bytes=workspaces, optimizer=optimizer)
        timeline = simulate(graph, program, workspace_bytes=workspaces, optimizer=optimizer)
        assert peak_bytes(requests) == timeline.peak_bytes


@pytest.mark.parametrize("optimizer", [None, MOMENTUM])
@pytest.mark.parametrize(
    "loss", [None, LossMemory(working_bytes=9 * MIB, lasting_bytes=2 * MIB, batch_bytes=MIB, output_bytes=3 * MIB)]
)
def test_a_loss_and_an_optimizer_are_part_of_it(optimizer, loss):
    graph = small_step()
    program = identity_program(graph)
    requests = step_requests(graph, program, optimizer=optimizer, loss=loss)
    assert peak_bytes(requests) == simulate(graph, program, optimizer=optimizer, loss=loss).peak_bytes


def test_what_is_computed_again_lives_twice():
    graph = small_step()
    program = Program(
        graph_digest=graph.digest(),
        forward=(Compute(0), Compute(1, in_place=True), Compute(2), Free(3)),
        backward=(Compute(0), Compute(1, in_place=True), Compute(3), Free(3), Free(5)),
    )
    requests = step_requests(graph, program, steps=1)
    assert [each.size_bytes // MIB for each in requests if isinstance(each, Allocate)] == [40, 8, 24, 3, 3, 24, 40]
    assert peak_bytes(requests) == simulate(graph, program).peak_bytes


def test_after_a_step_only_what_lasts_and_its_gradients_are_left():
    requests = step_requests(small_step(), identity_program(small_step()), optimizer=MOMENTUM)
    live = {each.handle: each.size_bytes for each in requests if isinstance(each, Allocate)}
    for each in requests:
        if isinstance(each, Release):
            del live[each.handle]
    assert sum(live.values()) == (40 + 8 + 70 + 40) * MIB


def test_gradients_go_when_the_next_step_begins():
    once, twice = (step_requests(small_step(), identity_program(small_step()), steps=count) for count in (1, 2))
    (gradient,) = (each.handle for each in once[2:] if isinstance(each, Allocate) and each.size_bytes == 40 * MIB)
    assert twice[: len(once) + 1] == [*once, Release(gradient)]


def test_optimizer_state_comes_in_blocks_of_the_parameters_sizes():
    adamw = OptimizerMemory(state_bytes=80 * MIB + 4, changes_bytes=(60 * MIB, -60 * MIB), workspace_bytes=60 * MIB)
    requests = step_requests(small_step(), identity_program(small_step()), optimizer=adamw, steps=1)
    sizes = [each.size_bytes for each in requests if isinstance(each, Allocate)]
    assert sizes[-5:] == [40 * MIB, 40 * MIB, 4, 40 * MIB, 20 * MIB]


def test_reserved_is_what_segments_take_and_a_better_setting_is_named():
    graph = small_step()
    reserved = reserved_memory(graph, identity_program(graph), optimizer=MOMENTUM)
    assert (
        reserved.reserved_bytes
        >= reserved.allocated_bytes
        >= simulate(graph, identity_program(graph), optimizer=MOMENTUM).peak_bytes
    )
    assert reserved.fragmentation_bytes == reserved.reserved_bytes - reserved.allocated_bytes
    assert reserved.best_reserved_bytes <= reserved.reserved_bytes
    assert reserved.allocated_bytes <= reserved.least_bytes <= reserved.reserved_bytes
    requests = step_requests(graph, identity_program(graph), optimizer=MOMENTUM)
    assert run_requests(requests, capacity_bytes=reserved.least_bytes).out_of_memory_at is None
    assert reserved.to_dict()["fragmentation_bytes"] == reserved.fragmentation_bytes
    assert ("with" in reserved.words()) is bool(reserved.best_setting)


def test_gradients_that_a_loop_keeps_stay_where_the_first_step_made_them():
    graph, program = with_kept_gradients(small_step(), identity_program(small_step()))
    requests = step_requests(graph, program, steps=2)
    gradients = [each.handle for each in requests[1:] if isinstance(each, Allocate) and each.size_bytes == 40 * MIB]
    first, second = gradients
    assert Release(first) not in requests
    assert requests.index(Release(second)) > requests.index(Allocate(second, 40 * MIB))
    assert peak_bytes(requests) == simulate(graph, program).peak_bytes


def test_outputs_that_a_loop_keeps_go_when_new_ones_are_made():
    graph, program = with_kept_outputs(small_step(), identity_program(small_step()))
    requests = step_requests(graph, program, steps=2)
    first, second = (
        each.handle
        for each in requests
        if isinstance(each, Allocate) and each.size_bytes == 3 * MIB and each.handle in outputs_of(requests)
    )
    assert requests.index(Release(first)) > requests.index(Allocate(second, 3 * MIB))
    assert Release(second) not in requests
    assert peak_bytes(requests) == simulate(graph, program).peak_bytes


def outputs_of(requests):
    """Blocks of the outputs' size that do not go before the end of their step: tangents do."""
    made = [each.handle for each in requests if isinstance(each, Allocate) and each.size_bytes == 3 * MIB]
    return made[::2]
