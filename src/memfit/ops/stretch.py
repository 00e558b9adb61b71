"""A stretch: neighbouring operators of a captured graph as one function, compiled by Inductor.

Note [A stretch is an operator]
    To everyone else a stretch is an operator like any other: it reads values and makes new ones, it is measured,
    timed, planned and run as they are. What it makes on the way never reaches memory where Inductor fuses it, and
    counts as workspace where it does not.

Note [Over the first]
    A stretch can write its first result over its first argument, if they look alike and nothing else inside reads that
    result. The form that does so is another kernel, which is compiled where a plan has it, and takes as long. Where a
    plan is likely to have nothing but that form, it is compiled first, and stands in for the other one where costs are
    measured, until that one is compiled as well.

Note [Shared]
    Two stretches of the same operators on the same layouts are one object, compiled once. The name is a hash of
    what it computes, so that costs are remembered and plans are recognised from process to process. Inductor's own
    cache on disk remembers the kernels.

Note [Without a compiler]
    A stretch that cannot be compiled runs operator by operator: slower, with more memory on the way, and as right.
"""

import copy
import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from memfit import _torch
from memfit._compiler_start import believe_no_more, instructions
from memfit._kept_kernels import keep_kernel, kept_kernel, place_of
from memfit._whole_builds import throw_headers_away
from memfit.collecting import collected_later
from memfit.errors import first_line
from memfit.files import hash_of
from memfit.ops.lean import Alternative, LeanOperator, Site, is_dense, same_layout
from memfit.ops.number import NotFollowed, Number

log = logging.getLogger(__name__)

PREFIX = "memfit.stretch"
_OVER = "_"  # ends the names of forms that overwrite


class Stretch:
    """A function of tensors; compiled when it is first called, or before by `compile_all`."""

    __module__ = PREFIX
    _without_a_compiler = "a stretch of %d operators runs with eager kernels: %s"

    def __init__(self, graph: fx.Graph, digest: str) -> None:
        self.__name__ = digest
        self.graph = graph  # of primitive operators, with `meta["val"]` on every node
        self.failure = ""  # why it is not compiled
        self._run: Callable[[list[Any]], Sequence[Any]] | None = None
        self._finish: Callable[[], None] | None = None  # to be called before it runs
        self._threads = 0  # that kernels are written for
        self._place: Path | None = None  # where it is written down which files have them

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Tensors without memory that look like the arguments."""
        return [node.meta["val"] for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def outputs(self) -> list[fx.Node]:
        made: Any = self.graph.output_node().args[0]
        return list(made)

    @property
    def is_ready(self) -> bool:
        return self._run is not None and self._finish is None

    @property
    def is_ready_here(self) -> bool:
        """Whether it can run, and was compiled for as many threads as there are now."""
        return self.is_ready and self._threads == torch.get_num_threads()

    @property
    def is_compiled(self) -> bool:
        return self.is_ready and not self.failure

    def __call__(self, *tensors: torch.Tensor) -> Any:
        made = self._made(tensors)
        return made[0] if len(made) == 1 else made

    def _made(self, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        if not self.is_ready:
            compile_all([self])
        assert self._run is not None
        try:
            return self._run(list(tensors))
        except AssertionError as error:  # an argument has another layout than the trace said; nothing is written yet
            if self.failure:
                raise
            self._give_up(error)
            return self._run(list(tensors))

    def start_compiling(self) -> None:
        """Hand it to Inductor, whatever the caller is in the middle of; kernels are compiled beside what follows."""
        if self._run is not None and self._threads == torch.get_num_threads():
            return
        threads, self._place = torch.get_num_threads(), place_of(self.__name__)  # as things are now
        kept = kept_kernel(self._place)
        if kept is not None:
            self._run, self._finish, self.failure = kept, None, ""
        else:
            self._ask_inductor()
        self._threads = threads

    def _ask_inductor(self) -> None:
        try:
            self._run, self._finish = self._compiled()
        except Exception as error:  # whatever Inductor rejects, training goes on
            self._try_again(error)
        else:
            self.failure = ""

    def finish_compiling(self) -> None:
        """Wait for the kernels."""
        if self._finish is None:
            return
        try:
            self._finish()
        except Exception as error:  # whatever the compiler rejects, training goes on
            self._try_again(error)
        else:
            assert self._run is not None
            assert self._place is not None
            keep_kernel(self._place, self._run)
        self._finish = None

    def _try_again(self, error: Exception) -> None:
        """For other instructions if those that were believed may be the cause, else without files that are damaged."""
        cause = getattr(error, "inner_exception", error)  # of what Inductor raises itself
        if not isinstance(cause, OSError | ImportError) and type(cause).__name__ != "CppCompileError":
            self._give_up(error)
        elif believe_no_more():
            self._compile_for_others(cause)
        else:
            self._compile_afresh(cause)

    def _compile_for_others(self, found: Exception) -> None:
        """See Note [Believed until a kernel fails] in `_compiler_start.py`."""
        try:
            self._run, finish = self._compiled()
            finish()
        except Exception as error:
            self._compile_afresh(error)
            return
        assert self._place is not None
        keep_kernel(self._place, self._run)
        self.failure = ""
        log.info("a kernel was compiled anew for %s: %s", instructions() or "any processor", first_line(found))

    def _compiled(self) -> tuple[Callable[[list[Any]], Sequence[Any]], Callable[[], None]]:
        module = fx.GraphModule({}, copy.deepcopy(self.graph))  # Inductor changes what it is given
        return _torch.compile_graph(module, self.inputs)

    def _compile_afresh(self, found: Exception) -> None:
        throw_headers_away()
        try:
            with _torch.fresh_kernel_cache():
                self._run, finish = self._compiled()
                finish()
        except Exception as error:
            self._give_up(error)
            return
        self.failure = ""
        log.warning("a kernel in Inductor's cache is damaged (%s) and was compiled anew", first_line(found))

    def _give_up(self, error: Exception) -> None:
        """See Note [Without a compiler]."""
        self.failure = f"{type(error).__name__}: {first_line(error)}"
        level = logging.DEBUG if self.failure in _SAID else logging.WARNING
        log.log(level, self._without_a_compiler, self.size, self.failure)
        _SAID.add(self.failure)
        self._run = _one_by_one(fx.GraphModule({}, self.graph))

    @functools.cached_property
    def in_place(self) -> "Stretch | None":
        """The form that overwrites its first argument, see Note [Over the first]."""
        graph = _overwriting(self.graph)
        return None if graph is None else _OverFirst(graph, self)

    @property
    def stand_in(self) -> "Stretch | None":
        """The form that overwrites, if that is compiled and this one is not, see Note [Over the first]."""
        over = self.__dict__.get("in_place")  # not made for the question
        return over if over is not None and over.is_compiled and not self.is_ready else None

    @property
    def size(self) -> int:
        """How many operators it is made of."""
        return sum(node.op == "call_function" for node in self.graph.nodes)

    def __repr__(self) -> str:
        return f"{PREFIX}:{self.__name__}"


class _OverFirst(Stretch):
    """Returns its first argument, overwritten, before its other results."""

    __module__ = PREFIX
    _without_a_compiler = "what a stretch of %d operators makes is copied over its first argument: %s"

    def __init__(self, graph: fx.Graph, own: Stretch) -> None:
        super().__init__(graph, own.__name__ + _OVER)
        self._own = own

    def _give_up(self, error: Exception) -> None:
        """Inductor may take the one form and reject the other: then what that makes is copied."""
        super()._give_up(error)
        self._run = self._copied

    def _copied(self, tensors: list[Any]) -> Sequence[Any]:
        made = self._own._made(tensors)
        tensors[0].copy_(made[0])
        return made[1:]

    def __call__(self, *tensors: torch.Tensor) -> Any:
        made = self._made(tensors)
        return (tensors[0], *made) if made else tensors[0]


def _overwriting(graph: fx.Graph) -> fx.Graph | None:
    first = next(iter(graph.nodes))
    results: Any = graph.output_node().args[0]
    is_read = any(user.op != "output" for user in results[0].users)
    if first.op != "placeholder" or is_read or results[0].op == "placeholder":
        return None
    if not same_layout(first.meta["val"], results[0].meta["val"]) or not is_dense(first.meta["val"]):
        return None
    written = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            copied[node] = written.node_copy(node, copied.__getitem__)
    over = written.call_function(torch.ops.aten.copy_.default, (copied[first], copied[results[0]]))
    over.meta["val"] = first.meta["val"]
    written.output([copied[node] for node in results[1:]])
    return written


_STRETCHES: dict[str, Stretch] = {}
_SAID: set[str] = set()  # reasons that were given


def stretch_of(graph: fx.Graph) -> Stretch:
    """The stretch that computes what a graph does, see Note [Shared]."""
    digest = digest_of(graph)
    if digest not in _STRETCHES:
        _STRETCHES[digest] = Stretch(graph, digest)
    return _STRETCHES[digest]


def find_stretch(name: str) -> Stretch | None:
    """The stretch of a name as `ops.registry.name_of` gives it, or its form that overwrites."""
    digest = name.removeprefix(PREFIX + ":")
    found = _STRETCHES.get(digest.removesuffix(_OVER))
    return found.in_place if found is not None and digest.endswith(_OVER) else found


def compile_all(stretches: Iterable[Stretch], progress: Callable[[int, int], None] | None = None) -> float:
    """Compile what is not compiled yet; seconds it took."""
    start = time.monotonic()
    waiting = [each for each in dict.fromkeys(stretches) if not each.is_ready_here]
    steps = [each.start_compiling for each in waiting] + [each.finish_compiling for each in waiting]
    with collected_later():
        for done, step in enumerate(steps, start=1):
            step()
            if progress is not None:
                progress(done, len(steps))
    return time.monotonic() - start


def digest_of(graph: fx.Graph) -> str:
    """A short hash that graphs share that compute the same on the same layouts."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}

    def written(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return {"node": numbers[value]}
        if isinstance(value, list | tuple):
            return [written(each) for each in value]
        if isinstance(value, Number):
            raise NotFollowed("a number that every call takes anew cannot be compiled into a kernel")
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
    return hash_of(lines)[:16]


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
    certain=False,  # its memory is known only where it was compiled
    functions=(),
    alternatives=_no_alternatives,
)
