"""Write a captured graph with stretches in the place of neighbouring operators.

Note [Made again inside]
    A value of the forward pass that a stretch of the backward pass reads can be made again inside that stretch: it
    is never in memory then, and costs what the kernel that reads it takes longer. Such stretches stand in the graph
    as alternatives of the plain one, like the operators of `ops/`, and the planner chooses among them. So do
    stretches that make one big result of another stretch again without the rest: a normalised value from the
    statistics that are kept anyway.

Note [Scaled where it is read]
    Dropout divides its noise by a number, and the backward pass reads the quotient. Inside a stretch a division costs
    nothing. So stretches of the backward pass divide anew, and what is kept is the noise as it was drawn: ones and
    zeros, of which a bit each is enough (`ops/dropout.py`), and which the forward stretch need not write.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from memfit import _torch
from memfit.capture.nodes import (
    INHERITED,
    REMAKES,
    TECHNIQUE,
    behind_views,
    is_alternative,
    is_random,
    shows,
    tensors_of,
)
from memfit.capture.runs import Run, find_runs, is_fusible
from memfit.capture.stretches import Piece, arranged, cut_out, made_again, put_into
from memfit.capture.trace import Joint
from memfit.ops.lean import is_backward, is_worth_it, same_layout
from memfit.ops.stretch import STRETCH, Stretch, stretch_of

_SCALES = {
    torch.ops.aten.div.Scalar,
    torch.ops.aten.div.Tensor,
    torch.ops.aten.mul.Scalar,
    torch.ops.aten.mul.Tensor,
}
_SMALLEST_BYTES = 2**16  # of a value that is worth being made again
_LARGEST_BUFFER_BYTES = 2**18  # of which a copy from before the forward pass is kept, see `execute/rebuild.py`
_MOST_INSIDE = 4  # values that are made again inside a stretch, one by one and all together


def fuse(joint: Joint) -> None:
    """Put stretches into a traced graph, and beside them those that make values again."""
    graph = joint.graph_module.graph
    mode = _torch.detect_fake_mode([node.meta.get("val") for node in graph.nodes if node.op == "placeholder"])
    with torch.no_grad(), mode or contextlib.nullcontext():
        scaled = _scale_where_read(graph)
        _Fusing(graph).run()
        _scale_once(graph, scaled)


def _scale_where_read(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """See Note [Scaled where it is read]; the new nodes, and those that they do again."""
    scaled: dict[fx.Node, fx.Node] = {}
    for node in [each for each in graph.nodes if _is_scaled_noise(each)]:
        readers = [user for user in node.users if is_backward(user)]
        if not all(is_fusible(user) for user in readers) or any(
            user.op == "output" or shows(user) for user in node.users
        ):
            continue  # the quotient is kept in any case
        for user in readers:
            with graph.inserting_before(user):
                again = graph.node_copy(node, lambda each: each)
            again.meta = {key: user.meta[key] for key in INHERITED if key in user.meta}
            again.meta["val"] = _fresh(node.meta["val"])
            user.replace_input_with(node, again)
            scaled[again] = node
    return scaled


def _scale_once(graph: fx.Graph, scaled: dict[fx.Node, fx.Node]) -> None:
    """Where neither pass became a stretch the backward pass reads the quotient as before."""
    left = set(graph.nodes)
    for again, node in scaled.items():
        if again in left and node in left:
            again.replace_all_uses_with(node, propagate_meta=False)
            graph.erase_node(again)


def _is_scaled_noise(node: fx.Node) -> bool:
    """Whether a node of the forward pass is a draw times or by a number, and no smaller than what was drawn."""
    if node.target not in _SCALES or is_backward(node) or len(node.all_input_nodes) != 1:
        return False
    source = behind_views(node.all_input_nodes[0])
    drawn, made = tensors_of(source), tensors_of(node)
    return is_random(source) and sum(each.untyped_storage().nbytes() for each in drawn) <= sum(
        each.untyped_storage().nbytes() for each in made
    )


def stretches_in(graph: fx.Graph, *, alternatives: bool = True) -> list[Stretch]:
    """The stretches that a graph calls, each once."""
    calls = [node for node in graph.nodes if alternatives or not is_alternative(node)]
    return list(dict.fromkeys(node.target for node in calls if isinstance(node.target, Stretch)))


def alternatives_in(graph: fx.Graph) -> list[Stretch]:
    """The stretches that are nothing but alternatives of others, each once."""
    own = set(stretches_in(graph, alternatives=False))
    return [each for each in stretches_in(graph) if each not in own]


class _Fusing:
    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._again: dict[fx.Node, Piece] = {}  # how a big result of the forward pass is made, by its node

    def run(self) -> None:
        for run in find_runs(self._graph):
            self._replace(run)
        for node in reversed(self._graph.nodes):
            if shows(node) and not node.users:  # those who read it have it inside
                self._graph.erase_node(node)
        self._graph.lint()

    def _replace(self, run: Run) -> None:
        piece, outputs = arranged(cut_out(run), run.outputs)
        made: Any = piece.graph.output_node().args[0]
        if not all(same_layout(*pair) for pair in zip(_values(made), _values(outputs), strict=True)):
            return  # others read the layout that the model's own operators make
        run = dataclasses.replace(run, outputs=outputs)
        call = self._call(piece, run.last, name=f"{run.last.name}_stretch", after=run.last)
        call.meta["val"] = _fresh([node.meta["val"] for node in run.outputs])
        results = self._results(call, run)
        last = self._take_out(run, results)
        if run.is_backward:
            self._write_insides(piece, call, last)
        else:
            self._write_agains(piece, results, last)

    def _call(self, piece: Piece, like: fx.Node, *, name: str, after: fx.Node) -> fx.Node:
        with self._graph.inserting_after(after):
            call = self._graph.create_node("call_function", stretch_of(piece.graph), piece.inputs, name=name)
        call.meta = {key: like.meta[key] for key in INHERITED if key in like.meta and key != "seq_nr"}
        return call

    def _results(self, call: fx.Node, run: Run) -> list[fx.Node]:
        """The nodes that show what a stretch makes: itself, if that is one value."""
        if len(run.outputs) == 1:
            (call.meta["val"],) = call.meta["val"]
            return [call]
        results = [call]
        for place, output in enumerate(run.outputs):
            with self._graph.inserting_after(results[-1]):
                result = self._graph.create_node("call_function", operator.getitem, (call, place), name=output.name)
            result.meta = {**call.meta, "val": call.meta["val"][place]}
            results.append(result)
        return results[1:]

    def _take_out(self, run: Run, results: list[fx.Node]) -> fx.Node:
        """Let everyone read the stretch; the last node that shows something of it is returned.

        Views of what it makes come after it and show its memory.
        """
        last = results[-1]
        for output, result in zip(run.outputs, results, strict=True):
            views = _views(output)
            output.replace_all_uses_with(result, propagate_meta=False)
            for view in views:
                last.append(view)
                last = view
                args, kwargs = fx.node.map_arg((view.args, dict(view.kwargs)), lambda node: node.meta["val"])
                target: Any = view.target
                view.meta["val"] = target(*args, **kwargs)
        for node in reversed(run.members):
            self._erase(node)
        return last

    def _erase(self, node: fx.Node) -> None:
        for user in list(node.users):  # views that only members read
            self._erase(user)
        self._graph.erase_node(node)

    def _write_agains(self, piece: Piece, results: list[fx.Node], last: fx.Node) -> None:
        for place, result in enumerate(results):
            value = result.meta["val"]
            if not is_worth_it(value) or value.nbytes < _SMALLEST_BYTES:
                continue
            smaller = made_again(piece, place, results)
            self._again[result] = smaller or piece
            if smaller is not None:
                self._add_alternative(smaller, result, f"{result.name}_again", last)

    def _write_insides(self, piece: Piece, call: fx.Node, last: fx.Node) -> None:
        inner = {node: self._again[node] for node in piece.inputs if _can_be_inside(self._again.get(node))}
        several = [{node: one} for node, one in inner.items()][:_MOST_INSIDE]
        if 1 < len(inner) <= _MOST_INSIDE:
            several.append(inner)
        for number, some in enumerate(several):
            self._add_alternative(put_into(piece, some), call, f"{call.name}_inside_{number}", last)

    def _add_alternative(self, piece: Piece, of: fx.Node, name: str, last: fx.Node) -> None:
        node = self._call(piece, of, name=name, after=last)
        node.meta |= {"val": _fresh(of.meta["val"]), TECHNIQUE: STRETCH.name, REMAKES: of}


def _values(nodes: Iterable[fx.Node]) -> list[torch.Tensor]:
    return [node.meta["val"] for node in nodes]


def _can_be_inside(piece: Piece | None) -> bool:
    """Whether a piece makes one value, and reads no big buffer, which the forward pass may have changed by then."""
    if piece is None:
        return False
    results: Any = piece.graph.output_node().args[0]
    buffers = [node for node in piece.inputs if type(node.meta.get("desc")).__name__ == "BufferAOTInput"]
    return len(results) == 1 and all(node.meta["val"].nbytes <= _LARGEST_BUFFER_BYTES for node in buffers)


def _views(node: fx.Node) -> list[fx.Node]:
    """Views of a node and views of these, in the order of the graph."""
    found: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        for user in waiting.pop(0).users:
            if shows(user) and user not in found:
                found[user] = None
                waiting.append(user)
    order = {each: place for place, each in enumerate(node.graph.nodes)} if len(found) > 1 else {}
    return sorted(found, key=lambda each: order.get(each, 0))


def _fresh(value: Any) -> Any:
    """Tensors of the same layout in memory of their own."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return tuple(_fresh(each) for each in value)
