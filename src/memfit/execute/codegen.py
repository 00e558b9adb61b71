"""From a torch graph to a Python function with nothing in it but the operators.

The function takes its arguments in a list and empties it, and drops every value after its last
use, so that memory is freed exactly where the graph says. Operators are bound as locals.

Note [Not even a call]
    What does nothing as a rule, a function says of itself: `passes_while_empty` is a container and the place of the
    argument that it returns while nothing is in there. Then it is not called.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from memfit.ops.calls import faithful_call, quick_call
from memfit.ops.inplace import in_place_form
from memfit.ops.number import Number

OVERWRITES = "memfit_overwrites"  # mark on nodes that write over their first argument


def generate(graph: fx.Graph) -> Callable[[list[Any]], list[Any]]:
    """Make a boxed function of a graph."""
    source, constants = _Writer(graph).write()
    namespace: dict[str, Any] = {}
    # The source is written below from operators and numbered names; nothing in it comes from
    # outside: every value that is not a small integer, a bool or None is passed in by name.
    exec(compile(source, "<memfit program>", "exec"), namespace)
    function: Callable[[list[Any]], list[Any]] = namespace["bind"](*constants)
    function._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd knows
    return function


class _Writer:
    def __init__(self, graph: fx.Graph) -> None:
        self._nodes = list(graph.nodes)
        self._names = {node: f"v{number}" for number, node in enumerate(self._nodes)}
        self._constants: list[Any] = []
        self._constant_names: dict[int, str] = {}

    def write(self) -> tuple[str, list[Any]]:
        body = [f"        {line}" for line in self._body()]
        parameters = ", ".join(f"c{number}" for number in range(len(self._constants)))
        lines = [f"def bind({parameters}):", "    def program(args):", *body, "    return program"]
        return "\n".join(lines), self._constants

    def _body(self) -> Iterator[str]:
        placeholders = [node for node in self._nodes if node.op == "placeholder"]
        if placeholders:
            yield f"{', '.join(self._names[node] for node in placeholders)}, = args"
        yield "args.clear()"
        dying = self._dying()
        unused = [self._names[node] for node in placeholders if not node.users]
        if unused:
            yield f"del {', '.join(unused)}"
        for node in self._nodes:
            if node.op == "output":
                yield f"return {self._value(list(node.args[0]))}"
            elif node.op != "placeholder":
                yield f"{self._names[node]} = {self._call(node)}"
            if dying[node]:
                yield f"del {', '.join(self._names[each] for each in dying[node])}"

    def _dying(self) -> dict[fx.Node, list[fx.Node]]:
        """For every node, the values that nobody reads after it."""
        dying: dict[fx.Node, list[fx.Node]] = {node: [] for node in self._nodes}
        seen: set[fx.Node] = set()
        for node in reversed(self._nodes):
            for source in node.all_input_nodes:
                if source not in seen and node.op != "output":
                    dying[node].append(source)
                seen.add(source)
            if node.op == "call_function" and node not in seen:
                dying[node].append(node)
        return dying

    def _call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return self._constant(getattr(node.graph.owning_module, str(node.target)))
        target: Any = node.target
        if target is operator.getitem:
            source, index = node.args
            return f"{self._value(source)}[{self._value(index)}]"
        if node.meta.get(OVERWRITES):
            target = in_place_form(target)
        arguments = [self._value(arg) for arg in node.args]
        arguments += [f"{name}={self._value(value)}" for name, value in node.kwargs.items()]
        call = f"{self._constant(_function(target, node))}({', '.join(arguments)})"
        container, place = getattr(target, "passes_while_empty", (None, 0))  # see Note [Not even a call]
        return call if container is None else f"{call} if {self._constant(container)} else {arguments[place]}"

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._names[value]
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._value(item) for item in value)}]"
        if value is None or isinstance(value, bool) or type(value) is int:
            return repr(value)
        if isinstance(value, Number):
            return f"{self._constant(value.local)}.now"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        """The name of a bound value; one that is given twice is bound once."""
        name = self._constant_names.get(id(value))
        if name is None:
            name = self._constant_names[id(value)] = f"c{len(self._constants)}"
            self._constants.append(value)
        return name


def _function(target: Any, node: fx.Node) -> Callable[..., Any]:
    """What to call for a node, in the quickest way that is known for its arguments."""
    if any(not isinstance(source.meta.get("val"), torch.Tensor) for source in node.all_input_nodes):
        return faithful_call(target)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return quick_call(target, args, kwargs)
