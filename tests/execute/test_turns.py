import torch
from torch import fx

from memfit.execute.codegen import generate
from memfit.execute.handover import hand_over
from memfit.execute.turns import without_double_turns

aten = torch.ops.aten


def turned(*steps, returned=True):
    """A graph that doubles a matrix, then turns it by these steps."""
    graph = fx.Graph()
    node = graph.call_function(aten.mul.Tensor, (graph.placeholder("matrix"), 2.0))
    for target, *args in steps:
        node = graph.call_function(target, (node, *args))
    graph.output([node] if returned else [graph.call_function(aten.neg.default, (node,))])
    return graph


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_what_is_turned_twice_is_read_as_it_was():
    graph = turned((aten.t.default,), (aten.t.default,))
    matrix = torch.randn(2, 3)
    expected = generate(graph)([matrix])
    without_double_turns(graph)
    assert targets(graph) == [aten.mul.Tensor]
    assert torch.equal(generate(graph)([matrix])[0], expected[0])


def test_an_odd_number_of_turns_is_one():
    graph = turned(*[(aten.t.default,)] * 5)
    without_double_turns(graph)
    assert targets(graph) == [aten.mul.Tensor, aten.t.default]


def test_dimensions_that_are_exchanged_and_back_are_as_they_were():
    graph = turned((aten.transpose.int, 0, 1), (aten.transpose.int, 0, 1), returned=False)
    without_double_turns(graph)
    assert targets(graph) == [aten.mul.Tensor, aten.neg.default]


def test_other_dimensions_stay_exchanged():
    steps = (aten.transpose.int, 0, 1), (aten.transpose.int, 1, 2)
    graph = turned(*steps)
    without_double_turns(graph)
    assert targets(graph) == [aten.mul.Tensor, *(target for target, *_ in steps)]


def test_what_reads_the_first_turn_still_does():
    graph = fx.Graph()
    matrix = graph.placeholder("matrix")
    first = graph.call_function(aten.t.default, (matrix,))
    second = graph.call_function(aten.t.default, (first,))
    graph.output([graph.call_function(aten.mm.default, (first, second))])
    without_double_turns(graph)
    value = torch.randn(2, 3)
    assert torch.equal(generate(graph)([value])[0], value.t() @ value)


def test_what_is_given_does_not_become_a_result():
    graph = fx.Graph()
    matrix = graph.placeholder("matrix")
    graph.output([graph.call_function(aten.t.default, (graph.call_function(aten.t.default, (matrix,)),))])
    without_double_turns(graph)
    value = torch.randn(2, 3)
    assert generate(graph)([value])[0] is not value


def test_what_is_given_is_not_handed_over():
    graph = fx.Graph()
    given = graph.placeholder("tangents_1")
    turned_twice = graph.call_function(aten.t.default, (graph.call_function(aten.t.default, (given,)),))
    graph.output([graph.call_function(hand_over, (0, turned_twice, False, 1))])
    without_double_turns(graph)
    value = torch.randn(2, 3)
    assert generate(graph)([value])[0] is not value
