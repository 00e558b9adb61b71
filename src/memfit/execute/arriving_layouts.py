"""Backward passes whose gradients arrive in another layout than they were traced for.

Note [Layouts that arrive]
    A trace takes for granted that the gradient of an output is laid out as the output is, or as a loss was seen to make
    it. Torch copies one that is laid out otherwise before the captured backward pass begins. Sums over it (that of a
    bias) then add up in another order than eager's, which go by the layout. So what has arrived is given to the pass as
    it is: by a backward graph for these layouts, in which a view of what cannot be viewed is a copy, as it is in the
    formulas of autograd. Functions of lean operators, and operators of others, are given the layout that was traced.
"""

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from memfit import _torch
from memfit.capture.trace import Joint
from memfit.errors import first_line
from memfit.execute.arrivals import output_of
from memfit.execute.layouts import Layout, followed, laid_out, laid_out_as, layout_of, layouts_of

Boxed = Callable[[list[Any]], list[Any]]


class ArrivingLayouts:
    """Runs the backward graph of a call for the layouts that arrive, see Note [Layouts that arrive]."""

    def __init__(self, joint: Joint, first: int) -> None:
        """Autograd counts the outputs that may get gradients from `first` on."""
        self._outputs = joint.differentiated
        self._first = first
        self._now = threading.local()

    def watch(self, output: torch.Tensor) -> None:
        """Note what arrives in the backward pass behind an output."""
        node = _torch.compiled_node(output)
        if node is not None:
            _torch.before_backward(node, self._note)

    def _note(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        # Called right before the backward pass itself, by the same thread.
        self._now.arrived = {each: gradients[self._first + each] for each in self._outputs}

    def _put_in(
        self, arguments: list[Any], expected: Mapping[int, tuple[int, Layout]]
    ) -> tuple[tuple[int, Layout], ...]:
        """Put gradients as they arrived in the place of copies; return the places and layouts of those."""
        arrived: Mapping[int, Any] = self._now.__dict__.pop("arrived", {})
        found = []
        for place, (output, layout) in expected.items():
            gradient = arrived.get(output)
            if type(gradient) is torch.Tensor and layout_of(gradient) != layout:
                arguments[place] = gradient
                found.append((place, tuple(gradient.stride())))
        return tuple(found)

    def compiled(self, graph: fx.Graph, generate: Callable[[fx.Graph], Boxed]) -> Boxed:
        """A backward graph as a function."""
        functions: dict[tuple[tuple[int, Layout], ...], Boxed | None] = {(): generate(graph)}
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        expected = {
            place: (output, layout_of(node.meta["val"]))
            for place, node in enumerate(placeholders)
            if (output := output_of(node)) is not None
        }

        def run(arguments: list[Any]) -> list[Any]:
            key = self._put_in(arguments, expected)  # which holds no gradient
            if key not in functions:
                gradients = {placeholders[place]: layout for place, layout in key}
                functions[key] = _made_for(graph, gradients, generate)
            function = functions[key]
            if function is None:
                for place, _ in key:
                    arguments[place] = laid_out(arguments[place], placeholders[place].meta["val"].stride())
                return functions[()](arguments)  # type: ignore[misc]
            return function(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd knows
        return run


def _made_for(
    graph: fx.Graph, layouts: Mapping[fx.Node, Layout], generate: Callable[[fx.Graph], Boxed]
) -> Boxed | None:
    """Make a function for gradients as they are; None if that cannot be done."""
    try:
        return generate(_relaid(graph, layouts))
    except Exception as error:
        warnings.warn(
            "gradients arrive in another layout than outputs have and are copied, so that last bits may differ from "
            f"eager ({first_line(error)}); tell fit of the loss (loss=)",
            stacklevel=2,
        )
        return None


def _relaid(graph: fx.Graph, layouts: Mapping[fx.Node, Layout]) -> fx.Graph:
    """Copy a backward graph for other layouts of what it is given."""
    made = fx.Graph(graph.owning_module)
    values: dict[fx.Node, fx.Node] = {}
    relaid: set[fx.Node] = set()  # what is laid out otherwise
    for node in graph.nodes:
        if node.op == "output":
            made.output(fx.map_arg(node.args[0], values.__getitem__)).meta.update(node.meta)
            continue
        if node in layouts:
            values[node] = made.node_copy(node)
            values[node].meta["val"] = laid_out_as(node.meta["val"], layouts[node])
        elif node.op == "call_function" and not relaid.isdisjoint(node.all_input_nodes):
            values[node] = followed(made, node, values)
        else:
            values[node] = made.node_copy(node, values.__getitem__)
        if layouts_of(values[node]) != layouts_of(node):
            relaid.add(node)
    return made
