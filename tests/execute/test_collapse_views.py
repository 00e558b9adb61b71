import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from memfit.execute.codegen import OVERWRITES, generate
from memfit.execute.collapse_views import collapse_views, mark_contiguous

aten = torch.ops.aten
HEADS = (aten.select.int, 0, 1), (aten.view.default, [4, 6, 2]), (aten.transpose.int, 0, 1), (aten.unsqueeze.default, 0)


def chain(root, *steps, reader=aten.neg.default):
    """A graph that applies an operator to its argument of (3, 4, 12), then these views, then a reader."""
    graph = fx.Graph()
    argument = graph.placeholder("argument")
    with FakeTensorMode():
        argument.meta["val"] = torch.empty(3, 4, 12)
        node = argument
        for target, *args in ((root[0], *root[1:]), *steps, (reader,)):
            kwargs = {"memory_format": torch.contiguous_format} if target is aten.clone.default else {}
            value = target(node.meta["val"], *args, **kwargs)
            node = graph.call_function(target, (node, *args), kwargs)
            node.meta["val"] = value
    graph.output([node])
    return graph


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_a_chain_of_views_behind_a_copy_is_one_view_with_the_same_numbers():
    graph = chain((aten.clone.default,), *HEADS)
    given = torch.randn(3, 4, 12)
    expected = generate(graph)([given])
    mark_contiguous(graph)
    collapse_views(graph)
    assert targets(graph) == [aten.clone.default, aten.as_strided.default, aten.neg.default]
    assert torch.equal(generate(graph)([given])[0], expected[0])


@pytest.mark.parametrize("root", [(aten.mul.Tensor, 2.0), (aten.relu.default,)], ids=["mul", "relu"])
def test_views_of_what_follows_the_layout_of_its_argument_stay(root):
    """A gradient may arrive in another layout than the traced one."""
    graph = chain(root, *HEADS)
    mark_contiguous(graph)
    collapse_views(graph)
    assert aten.as_strided.default not in targets(graph)


def test_short_chains_stay():
    graph = chain((aten.clone.default,), *HEADS[:2])
    mark_contiguous(graph)
    collapse_views(graph)
    assert aten.as_strided.default not in targets(graph)


def test_views_of_what_is_written_over_another_value_stay():
    graph = chain((aten.clone.default,), *HEADS)
    mark_contiguous(graph)
    for node in graph.nodes:
        node.meta[OVERWRITES] = node.target is aten.clone.default
    collapse_views(graph)
    assert aten.as_strided.default not in targets(graph)


def test_a_view_that_others_read_too_stays():
    graph = chain((aten.clone.default,), *HEADS)
    first = next(node for node in graph.nodes if node.target is aten.select.int)
    output = graph.output_node()
    with graph.inserting_before(output):
        other = graph.call_function(aten.neg.default, (first,))
    output.args = ([output.args[0][0], other],)
    given = torch.randn(3, 4, 12)
    expected = generate(graph)([given])
    mark_contiguous(graph)
    collapse_views(graph)
    assert targets(graph).count(aten.select.int) == targets(graph).count(aten.as_strided.default) == 1
    assert all(map(torch.equal, generate(graph)([given]), expected))


def test_what_is_read_from_another_pass_keeps_its_mark():
    """A view in a backward pass is made anew behind what the forward pass has kept."""
    graph = chain((aten.clone.default,), *HEADS)
    mark_contiguous(graph)
    copy = next(node for node in graph.nodes if node.target is aten.clone.default)
    backward = fx.Graph()
    kept = backward.placeholder("kept")
    kept.meta = dict(copy.meta)
    names = {copy: kept}
    for node in list(graph.nodes)[2:]:
        names[node] = backward.node_copy(node, lambda each: names[each])
    collapse_views(backward)
    assert targets(backward) == [aten.as_strided.default, aten.neg.default]
