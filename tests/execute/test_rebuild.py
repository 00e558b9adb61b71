"""Any program of a graph, run without autograd around it, and programs that cannot be run."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import decided, keep_everything, keep_nothing, keeping, lazy_program, planned
from torch import nn
from twins import MODELS, assert_same, train_step

from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.errors import ExecutionError
from memfit.execute.codegen import generate
from memfit.execute.partition import planned_partition, unplanned_program
from memfit.ir import Compute, Free, Phase


class Traced:
    """A traced model whose programs can be run one after the other."""

    def __init__(self, name):
        make_model, make_batch = MODELS[name]
        torch.manual_seed(0)
        model, batch = make_model(), make_batch()
        with traced(model, Sample.of(batch)) as joint:
            self._module = joint.graph_module
            self.graph = lower(joint)
        self._output = self._module.graph.output_node()
        placeholders = [node.meta["val"] for node in self._module.graph.find_nodes(op="placeholder")]
        self._given = [weight for _, weight in model.named_parameters(remove_duplicate=False)]
        self._given += [*model.buffers(), batch]
        self._tangents = [torch.randn(value.shape) for value in placeholders[len(self._given) :]]
        self._forward_outputs = sum(
            type(each).__name__ in ("PlainAOTOutput", "InputMutationAOTOutput") for each in self._output.meta["desc"]
        )
        self.expected = self.results(unplanned_program(self.graph))

    def results(self, program):
        """Outputs, gradients and the generator after one step."""
        partition = planned_partition(self.graph, program)
        passes = partition(self._module, None, num_fwd_outputs=self._forward_outputs)
        forward, backward = (generate(each.graph) for each in passes)
        with torch.no_grad():
            torch.manual_seed(3)
            made = forward([each.detach() for each in self._given])
            outputs, saved = made[: self._forward_outputs], made[self._forward_outputs :]
            return [*outputs, *backward([*saved, *self._tangents]), torch.get_rng_state()]


@pytest.fixture(scope="module", params=MODELS)
def traced_model(request):
    return Traced(request.param)


def subsets(things):
    return st.sets(st.sampled_from(things)) if things else st.just(set())


@settings(max_examples=8)
@given(data=st.data())
def test_any_program_computes_the_same(traced_model, data):
    graph = traced_model.graph
    forgotten = data.draw(subsets(decided(graph)))
    out_of_place = data.draw(subsets(range(len(graph.operations))))
    program = lazy_program(
        graph,
        data.draw(subsets(decided(graph))),
        forgotten=forgotten.__contains__,
        in_place=lambda operation: operation not in out_of_place,
    )
    assert_same(traced_model.results(program), traced_model.expected)


def test_a_forward_value_is_computed_again_in_the_forward_pass(traced_model):
    """Every forward operation twice, draws and new buffer values included."""
    program = unplanned_program(traced_model.graph)
    twice = []
    for instruction in program.forward:
        plain = Compute(instruction.operation)
        twice += [plain, plain]
    program = dataclasses.replace(program, forward=tuple(twice))
    assert_same(traced_model.results(program), traced_model.expected)


def test_of_two_copies_the_older_can_be_the_one_that_stays(traced_model):
    """What is live already is made again and dropped at once, as a planner does for a neighbour's sake."""
    graph = traced_model.graph
    program = lazy_program(graph, decided(graph), in_place=lambda _: False)
    backward = []
    for instruction in program.backward:
        backward.append(instruction)
        if isinstance(instruction, Compute):
            operation = graph.operation(instruction.operation)
            lasting = {*graph.held, *graph.tangents}
            if operation.phase is Phase.FORWARD and lasting.isdisjoint(operation.outputs):
                backward += [instruction, *(Free(storage) for storage in operation.outputs)]
    program = dataclasses.replace(program, backward=tuple(backward))
    assert_same(traced_model.results(program), traced_model.expected)


def conv_program(change):
    """A program of the convolutional model with something wrong in it."""
    model = Traced("conv")
    program = keep_everything(model.graph)
    return model, change(model.graph, program)


def place_of(graph, name):
    return next(place for place, operation in enumerate(graph.operations) if operation.name == name)


def test_reading_what_was_freed_is_refused():
    def free_early(graph, program):
        (relu,) = graph.operations[place_of(graph, "relu")].outputs
        return dataclasses.replace(program, backward=(Free(relu), *program.backward))

    model, program = conv_program(free_early)
    with pytest.raises(ExecutionError, match=r"read 'relu' \(relu\), which is not in memory there \(in the backward"):
        model.results(program)


def test_reading_what_was_overwritten_is_refused():
    def overwrite(graph, program):
        mul = place_of(graph, "mul")  # its input is read in the backward pass
        forward = [Compute(mul, True) if each == Compute(mul) else each for each in program.forward]
        return dataclasses.replace(program, forward=tuple(forward))

    model, program = conv_program(overwrite)
    with pytest.raises(ExecutionError, match="read 'relu_1'"):
        model.results(program)


def test_overwriting_what_cannot_be_is_refused():
    def overwrite(graph, program):
        convolution = place_of(graph, "convolution_1")
        forward = [Compute(convolution, True) if each == Compute(convolution) else each for each in program.forward]
        return dataclasses.replace(program, forward=tuple(forward))

    model, program = conv_program(overwrite)
    with pytest.raises(ExecutionError, match=r"runs 'convolution_1' \(aten.convolution.default\) in place"):
        model.results(program)


def test_a_draw_that_is_left_out_is_refused():
    def leave_out(graph, program):
        bernoulli = place_of(graph, "bernoulli")
        forward = [each for each in program.forward if getattr(each, "operation", None) != bernoulli]
        return dataclasses.replace(program, forward=tuple(forward))

    model, program = conv_program(leave_out)
    with pytest.raises(ExecutionError, match="draws random numbers in another order"):
        model.results(program)


def test_the_graph_of_another_model_is_refused():
    model, other = Traced("conv"), Traced("encoder")
    model.graph = other.graph
    with pytest.raises(ExecutionError, match="the graph of another model"):
        model.results(unplanned_program(other.graph))


def test_a_result_that_was_never_made_is_refused():
    def leave_out(graph, program):
        add = place_of(graph, "add")  # the next num_batches_tracked
        return dataclasses.replace(
            program, forward=tuple(each for each in program.forward if getattr(each, "operation", None) != add)
        )

    model, program = conv_program(leave_out)
    with pytest.raises(ExecutionError, match="lets the caller read 'add'"):
        model.results(program)


def lean_layers():
    return nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(inplace=True),
    )


@pytest.mark.parametrize("forgotten", [False, True], ids=["remembering", "forgetting"])
def test_alternatives_make_the_same_values(forgotten):
    eager, batch = lean_layers(), torch.randn(4, 8, 16, 16)
    used = []

    def planner(graph):
        program = keeping(forgotten=lambda _: forgotten, lean=True)(graph)
        runs = [each.operation for each in (*program.forward, *program.backward) if isinstance(each, Compute)]
        used.extend(graph.operation(run).technique for run in runs if run >= len(graph.operations))
        return program

    captured = planned(eager, batch, planner, techniques=("lean",))
    assert {"batch_norm", "dropout", "relu"} <= {*used}
    for seed in (3, 4):
        assert_same(train_step(eager, batch, seed), train_step(captured, batch, seed))


def test_alternatives_that_are_not_planned_are_left_out():
    eager, batch = lean_layers(), torch.randn(4, 8, 16, 16)
    captured = planned(eager, batch, keep_nothing, techniques=("lean",))
    assert_same(train_step(eager, batch), train_step(captured, batch))
