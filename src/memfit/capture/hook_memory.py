"""Tell what hooks of modules add to a step, from two steps on tensors without memory: with the hooks and without them.

Note [More at most]
    A plan is made and measured without hooks. What they make, what they keep, and what is kept of what they make, is
    the difference of the two steps, operator by operator: operators of the step without hooks are found again in the
    other one. The largest difference is reserved over the whole step, for a plan moves what lives when.
    Hooks that print, look at values or at files are not run, nor are those of tensors, nor those of all modules.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import nn

from memfit.capture.eager_step import eager_step
from memfit.capture.hooks import hooks_inside, hooks_left_out, hooks_of_modules
from memfit.capture.refusals import refusing
from memfit.capture.sample import Sample
from memfit.capture.state import python_put_back
from memfit.ir import Compute, Graph, Program

Step = tuple[Graph, Program]


def _refusing() -> AbstractContextManager[Any]:
    return refusing(again=True)


class _Moment(NamedTuple):
    """An operator that runs."""

    key: tuple[str, ...]  # what it is and where it stands
    live_bytes: int  # while it runs
    left_bytes: int  # when what nobody holds behind it has gone


def hook_bytes(model: nn.Module, sample: Sample, *, backward_from: str = "auto") -> int | None:
    """Return what hooks of a model's parts add to its step at most; None if that is not known."""
    with python_put_back(model, sample, hooks_of_modules(model)), hooks_inside(model, _refusing):
        hooked = eager_step(model, sample, backward_from=backward_from)
    if hooked is None:
        return None
    with hooks_left_out(model):
        plain = eager_step(model, sample, backward_from=backward_from)
    return None if plain is None else more_bytes(plain, hooked)


def more_bytes(plain: Step, hooked: Step) -> int | None:
    """Return how much more lives in the second step, which does more; None if it does not do all of the first."""
    waiting = [*_moments(*plain)]
    waiting.reverse()
    most_bytes = left_bytes = 0
    for each in _moments(*hooked):
        if waiting and waiting[-1].key == each.key:
            own = waiting.pop()
            left_bytes = own.left_bytes
            most_bytes = max(most_bytes, each.live_bytes - own.live_bytes)
        else:
            most_bytes = max(most_bytes, each.live_bytes - left_bytes)
        most_bytes = max(most_bytes, each.left_bytes - left_bytes)
    return None if waiting else most_bytes


def _moments(graph: Graph, program: Program) -> Iterator[_Moment]:
    size_of = [each.size_bytes for each in graph.storages]
    now_bytes = live_bytes = 0
    running = None
    for instruction in (*program.forward, *program.backward):
        if not isinstance(instruction, Compute):
            now_bytes -= size_of[instruction.storage]
            continue
        if running is not None:
            yield _Moment(running, live_bytes, now_bytes)
        operation = graph.operation(instruction.operation)
        if instruction.in_place and operation.may_overwrite is not None:
            now_bytes -= size_of[operation.may_overwrite]
        now_bytes += sum(size_of[each] for each in operation.outputs)
        running, live_bytes = (operation.phase, operation.target, operation.module, operation.source), now_bytes
    if running is not None:
        yield _Moment(running, live_bytes, now_bytes)
