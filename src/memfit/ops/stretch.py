"""A stretch: neighbouring operators of a captured graph as one function, compiled by Inductor.

Note [A stretch is an operator]
    To everyone else a stretch is an operator like any other: it reads values and makes new ones, it is measured,
    timed, planned and run as they are. What it makes on the way never reaches memory where Inductor fuses it, and
    counts as workspace where it does not.

Note [Shared]
    Two stretches of the same operators on the same layouts are one object, compiled once. The name is a hash of
    what it computes, so that costs are remembered and plans are recognised from process to process. Inductor's own
    cache on disk remembers the kernels.

Note [Without a compiler]
    A stretch that cannot be compiled runs operator by operator: slower, with more memory on the way, and as right.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from memfit import _torch
from memfit.ops.lean import Alternative, LeanOperator, Site

log = logging.getLogger(__name__)

PREFIX = "memfit.stretch"


class Stretch:
    """A function of tensors; compiled when it is first called, or before by `compile_all`."""

    __module__ = PREFIX

    def __init__(self, graph: fx.Graph, digest: str) -> None:
        self.__name__ = digest
        self.graph = graph  # of primitive operators, with `meta["val"]` on every node
        self.failure = ""  # why it is not compiled
        self._run: Callable[[list[Any]], Sequence[Any]] | None = None

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Tensors without memory that look like the arguments."""
        return [node.meta["val"] for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def outputs(self) -> list[fx.Node]:
        made: Any = self.graph.output_node().args[0]
        return list(made)

    @property
    def is_compiled(self) -> bool:
        return self._run is not None and not self.failure

    def __call__(self, *tensors: torch.Tensor) -> Any:
        made = (self._run or self.compile())(list(tensors))
        return made[0] if len(made) == 1 else made

    def compile(self) -> Callable[[list[Any]], Sequence[Any]]:
        """Compile now, whatever the caller is in the middle of; see Note [Without a compiler]."""
        module = fx.GraphModule({}, self.graph)
        try:
            self._run = _torch.compile_graph(module, self.inputs)
        except Exception as error:  # whatever Inductor or the compiler rejects, training goes on
            self.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            log.warning("a stretch of %d operators runs with eager kernels: %s", self.size, self.failure)
            self._run = _one_by_one(module)
        return self._run

    @property
    def size(self) -> int:
        """How many operators it is made of."""
        return sum(node.op == "call_function" for node in self.graph.nodes)

    def __repr__(self) -> str:
        return f"{PREFIX}:{self.__name__}"


_STRETCHES: dict[str, Stretch] = {}


def stretch_of(graph: fx.Graph) -> Stretch:
    """The stretch that computes what a graph does, see Note [Shared]."""
    digest = _digest(graph)
    if digest not in _STRETCHES:
        _STRETCHES[digest] = Stretch(graph, digest)
    return _STRETCHES[digest]


def find_stretch(name: str) -> Stretch | None:
    """The stretch of a name as `ops.registry.name_of` gives it."""
    return _STRETCHES.get(name.removeprefix(PREFIX + ":"))


def compile_all(stretches: Iterable[Stretch], progress: Callable[[int, int], None] | None = None) -> float:
    """Compile what is not compiled yet; seconds it took."""
    start = time.monotonic()
    waiting = [each for each in dict.fromkeys(stretches) if each._run is None]
    for done, each in enumerate(waiting, start=1):
        each.compile()
        if progress is not None:
            progress(done, len(waiting))
    return time.monotonic() - start


def _digest(graph: fx.Graph) -> str:
    numbers = {node: number for number, node in enumerate(graph.nodes)}

    def written(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return {"node": numbers[value]}
        if isinstance(value, list | tuple):
            return [written(each) for each in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return str(value)

    lines: list[Any] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            lines.append([str(value.dtype), list(value.shape), list(value.stride()), str(value.device)])
        else:
            lines.append(
                [str(node.target), written(node.args), {key: written(node.kwargs[key]) for key in node.kwargs}]
            )
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]


def _one_by_one(module: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    def run(tensors: list[Any]) -> Sequence[Any]:
        made: Sequence[Any] = module(*tensors)
        return made

    return run


def _no_alternatives(_site: Site) -> tuple[Alternative, ...]:
    return ()  # they are written when stretches are found, see `capture/fuse.py`


STRETCH = LeanOperator(
    name="stretch",
    technique="inductor",
    keeps="neighbouring operators as one compiled kernel, values of the forward pass made again inside it",
    exact=False,
    functions=(),
    alternatives=_no_alternatives,
)
