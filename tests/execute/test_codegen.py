import gc
import weakref

import torch
from torch import fx

from memfit.execute.codegen import OVERWRITES, generate

aten = torch.ops.aten


def graph_of(build):
    graph = fx.Graph()
    build(graph)
    return graph


def chain(graph):
    first = graph.placeholder("first")
    graph.placeholder("unused")
    doubled = graph.call_function(aten.mul.Tensor, (first, 2.0))
    total = graph.call_function(aten.add.Tensor, (doubled, first), {"alpha": 3})
    graph.output([total, None])


def test_the_function_computes_what_the_graph_says():
    program = generate(graph_of(chain))
    value = torch.randn(3)
    result, nothing = program([value, torch.randn(1)])
    assert nothing is None
    assert torch.equal(result, torch.add(value * 2.0, value, alpha=3))


def test_the_function_empties_the_list_of_its_arguments():
    arguments = [torch.randn(3), torch.randn(1)]
    generate(graph_of(chain))(arguments)
    assert arguments == []


def test_an_argument_is_released_after_its_last_use():
    released = []

    def watch(graph):
        first = graph.placeholder("first")
        squared = graph.call_function(aten.mul.Tensor, (first, first))
        graph.output([graph.call_function(_noting(released), (squared,))])

    argument = torch.randn(3)
    released.append(weakref.ref(argument))
    arguments = [argument]
    del argument
    generate(graph_of(watch))(arguments)
    assert released == [released[0], "gone"]


def _noting(released):
    def note(value):
        gc.collect()
        released.append("alive" if released[0]() is not None else "gone")
        return value

    return note


def test_a_marked_node_writes_over_its_first_argument():
    def build(graph):
        first = graph.placeholder("first")
        result = graph.call_function(aten.relu.default, (first,))
        result.meta[OVERWRITES] = True
        graph.output([result])

    value = torch.tensor([-1.0, 2.0])
    (result,) = generate(graph_of(build))([value])
    assert result.data_ptr() == value.data_ptr()
    assert value.tolist() == [0.0, 2.0]


def test_constants_of_any_kind_reach_the_operator():
    def build(graph):
        first = graph.placeholder("first")
        copy = graph.call_function(aten._to_copy.default, (first,), {"dtype": torch.float64})
        clamped = graph.call_function(aten.clamp.default, (copy, None, float("inf")))
        graph.output([graph.call_function(aten.permute.default, (clamped, [1, 0]))])

    value = torch.randn(2, 3)
    (result,) = generate(graph_of(build))([value])
    assert torch.equal(result, value.double().t())


def test_a_graph_without_arguments_works():
    def build(graph):
        graph.output([graph.call_function(aten.ones.default, ([2],))])

    (result,) = generate(graph_of(build))([])
    assert result.tolist() == [1.0, 1.0]
