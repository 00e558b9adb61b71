"""Put captured calls behind a module's own forward, and take them away again.

Note [Drop-in]
    Only the attribute `forward` of the instance changes: class, parameters, buffers, `state_dict`
    keys and hooks of the module stay what they are. In `eval()`, under `no_grad` and where nothing
    requires a gradient, the original forward runs; so it does inside transforms of `torch.func`, which a captured call
    cannot be part of, and, with a warning, where somebody looks at the tensors that autograd saves or at the functions
    of torch that are called, or where an argument has attributes of its own: a captured call saves and calls others.

Note [Wrapped forwards]
    Others wrap a forward after us: Accelerate puts autocast around it. Then ours is found behind theirs, by the
    `__wrapped__` that `functools.wraps` leaves. What takes it away leaves theirs: ours steps aside for the original.

Note [Regions]
    A model that cannot be captured whole runs by itself, and some of its parts through memfit. Each
    of them knows the model it is a region of, so that it is removed with the others.
"""

import contextlib
import copy
import dataclasses
import functools
import logging
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memfit import _torch
from memfit.alone import alone
from memfit.capture.arguments import containers_in
from memfit.capture.blame import BUGS, failed_running, is_of_the_model
from memfit.capture.guards import Place
from memfit.capture.held import own_kind
from memfit.capture.numbers import following
from memfit.capture.questions import ASKED
from memfit.capture.rehearse import nothing_remains
from memfit.capture.sample import cut_off
from memfit.errors import CaptureError, ExecutionError, InfeasibleBudget, InvalidInput, MemfitError
from memfit.execute.call import Call
from memfit.execute.differences import difference
from memfit.execute.gate import Gate
from memfit.execute.kinds import LastCall, attributes_on, kind_of_call, parts_of, requires_grad
from memfit.trees import flatten

log = logging.getLogger(__name__)

_MOST_OF_A_KIND = 15  # captured calls that have read different values, besides the newest
_CALL_OF_MODULE = nn.Module._call_impl.__code__
_FOLLOWED_FROM = 2  # changes of a number
_TOO_MANY = 3  # captures for one reason, before it is said what to do


Compile = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Call]


def attach(model: nn.Module, compile_call: Compile, *, whole: nn.Module | None = None) -> "PlannedForward":
    """Run `model.forward` through captured calls, made by `compile_call` when a new kind of call comes.

    `whole` is the model that this one is a region of, see Note [Regions].
    """
    check_unplanned(model)
    planned = PlannedForward(model, compile_call, whole)
    model.forward = planned
    return planned


def check_unplanned(model: nn.Module) -> None:
    """Refuse a model that runs through memfit."""
    if is_planned(model) or regions_of(model):
        raise InvalidInput(f"this {type(model).__name__} runs through memfit already; call memfit.remove(model) first")


def remove(model: nn.Module) -> nn.Module:
    """Give a module its own forward back. A module that was never changed is returned as it is."""
    forward = planned_forward(model)
    if forward is not None:
        forward.restore()
    for forward in regions_of(model):
        forward.restore()
    return model


def regions_of(model: nn.Module) -> list["PlannedForward"]:
    """The forwards of the parts that were attached as regions of a model."""
    return [forward for forward in _all_planned(model) if forward.whole is model]


def planned_forwards(model: nn.Module) -> list["PlannedForward"]:
    """What `remove` would take away: `put_back` undoes that."""
    forward = planned_forward(model)
    return [*([] if forward is None else [forward]), *regions_of(model)]


def put_back(forwards: Sequence["PlannedForward"]) -> None:
    """Let modules run through memfit again."""
    for forward in forwards:
        forward.put_back()


@contextlib.contextmanager
def removed(model: nn.Module) -> Iterator[None]:
    """Run a module and its parts by their own forwards for a while."""
    planned = _all_planned(model)
    for forward in planned:
        forward.restore()
    try:
        yield
    finally:
        put_back(planned)


def is_planned(module: nn.Module) -> bool:
    """Whether a module runs through memfit."""
    return planned_forward(module) is not None


def planned_forward(module: nn.Module) -> "PlannedForward | None":
    """The planned forward of a module, also behind what others put around it, see Note [Wrapped forwards]."""
    forward = module.__dict__.get("forward")
    while forward is not None and not isinstance(forward, PlannedForward):
        forward = getattr(forward, "__wrapped__", None)
    return forward if forward is not None and forward.active else None


def _all_planned(model: nn.Module) -> list["PlannedForward"]:
    return [forward for module in model.modules() if (forward := planned_forward(module)) is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Captures:
    """How often a fitted model met a new kind of call."""

    count: int
    seconds: float  # that all of them took, planning included
    calls: int  # that ran captured, the first of each kind among them

    @property
    def hit_rate(self) -> float:
        """The part of the calls that found theirs captured before."""
        return 1 - self.count / self.calls if self.calls > self.count else 0.0

    def __str__(self) -> str:
        return f"{self.count} captures in {self.seconds:.1f} s for {self.calls} calls, hit rate {self.hit_rate:.1%}"


def captures_of(model: nn.Module) -> Captures:
    """How many kinds of calls a fitted model and its regions captured so far, and what that took."""
    forwards = planned_forwards(model)
    return Captures(
        count=sum(len(each) for forward in forwards for each in forward.calls.values()),
        seconds=sum(forward.capture_s for forward in forwards),
        calls=sum(forward.runs for forward in forwards),
    )


class PlannedForward:
    """Stands in for a module's forward, see Note [Drop-in]."""

    def __init__(self, model: nn.Module, compile_call: Compile, whole: nn.Module | None = None) -> None:
        self.calls: dict[Any, list[Call]] = {}  # by kind; of one kind there are some that have read other values
        self.compile_call = compile_call
        self.whole = whole
        self.active = True  # else the original runs, see Note [Wrapped forwards]
        self.capture_s = 0.0
        self.runs = 0  # of captured calls
        self._reasons: Counter[str] = Counter()  # why calls were captured after the first
        self._said: set[str] = set()
        self._changes: Counter[str] = Counter()  # of numbers that the code reads, by path
        self._followed: list[Place] = []  # numbers that calls take anew, see `capture/numbers.py`
        self._last: LastCall | None = None
        self._before: Call | None = None  # what the call before this one ran
        self._model = model
        self._instance_forward = model.__dict__.get("forward")  # set if somebody replaced it before us
        functools.update_wrapper(self, self.original)

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that runs without memfit."""
        forward: Callable[..., Any] = self._instance_forward or type(self._model).forward.__get__(self._model)
        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._called(sys._getframe(1), args, kwargs)
        except BUGS as error:
            if is_of_the_model(error):
                raise
            raise failed_running(error) from error

    def _called(self, caller: types.FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if caller.f_code is _CALL_OF_MODULE and caller.f_locals["self"] is not self._model:
            return self._of_a_copy(caller.f_locals["self"], args, kwargs)
        leaves, spec = flatten((args, kwargs))
        if not self.active or _torch.is_transformed() or self._is_looked_at(leaves):
            return self.original(*args, **kwargs)
        last = self._last  # another thread may replace it
        if (
            last is not None
            and (same := last.states(leaves, spec, args, kwargs)) is not None
            and last.call.guards.hold()
            and last.call.questions.hold(leaves)
        ):
            self.runs += 1
            return last.call(same, args, kwargs)
        modules, states = parts_of(self._model)
        if not self._model.training or not torch.is_grad_enabled() or not requires_grad(states, leaves):
            return self.original(*args, **kwargs)
        containers = containers_in(args, kwargs)
        kind = kind_of_call(modules, states, leaves, spec, containers)
        call = _like(self.calls.get(kind, []), leaves)
        if call is None:
            try:
                call = self._new(kind, modules, leaves, args, kwargs)
            except CaptureError:
                if not self._fails_by_itself(args, kwargs):
                    raise
                return self.original(*args, **kwargs)  # raises what the loop may be waiting for
        # Calls of several kinds in turns are not worth being remembered one by one.
        self._last = LastCall.of(call, modules, states, leaves, spec, containers) if call is self._before else None
        self._before = call
        self.runs += 1
        call.look_again()
        return call(states, args, kwargs)

    def _new(self, kind: Any, modules: list[nn.Module], leaves: list[Any], args: Any, kwargs: Any) -> Call:
        """Capture a call; or take the one that another thread has captured meanwhile."""
        with alone():
            of_kind = self.calls.get(kind, [])
            call = _like(of_kind, leaves)
            if call is not None:
                return call
            why = self._why(kind, modules, leaves)
            followed = self._following(args, kwargs, of_kind)
            call = followed or self._captured(args, kwargs, why)
            self.calls[kind] = [*of_kind[-_MOST_OF_A_KIND:], call]
            if followed is None:
                self._advise(why)
            return call

    def _of_a_copy(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the own forward of a shallow copy, which has got this object with all other attributes."""
        self._say_once(f"a copy of {type(model).__name__} runs by its own forward, without a plan; fit it, too")
        return (self._instance_forward or type(model).forward.__get__(model))(*args, **kwargs)

    def _is_looked_at(self, leaves: list[Any]) -> bool:
        """Return whether something is seen or carried that a captured call does not have, see Note [Drop-in]."""
        if _torch.saved_tensors_hooks():
            why = "saved_tensors_hooks are active (of torch.utils.checkpoint, save_on_cpu or your own)"
        elif modes := _torch.function_modes():
            why = f"{type(modes[-1]).__name__} sees the functions of torch that are called"
        elif modes := _torch.dispatch_modes():
            why = f"{type(modes[-1]).__name__} sees the operators that run"
        elif names := attributes_on(leaves):
            why = f"a tensor that it is given has attributes of its own ({', '.join(names)})"
        elif kind := own_kind(leaves):
            why = f"a tensor that it is given {kind}"
        else:
            return False
        self._say_once(f"{type(self._model).__name__} runs by its own forward, without a plan, because {why}")
        return True

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, stacklevel=5)

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture this kind of call, so that the next one of it runs at once."""
        modules, states = parts_of(self._model)
        leaves, spec = flatten((args, kwargs))
        call = self._captured(args, kwargs)
        self.calls[kind_of_call(modules, states, leaves, spec, containers_in(args, kwargs))] = [call]
        self._last = None

    def restore(self) -> None:
        if self._model.__dict__.get("forward") is not self:
            self.active = False
            return
        del self._model.__dict__["forward"]
        if self._instance_forward is not None:
            self._model.__dict__["forward"] = self._instance_forward

    def put_back(self) -> None:
        if self.active:
            self._model.__dict__["forward"] = self
        self.active = True

    def _following(self, args: Any, kwargs: Any, of_kind: list[Call]) -> Call | None:
        """Capture a call that takes numbers anew which have changed before; None if there are none to be followed."""
        changed = of_kind[-1].guards.changed_numbers() if of_kind else []
        self._changes.update(each.path for each in changed)
        new = [each for each in changed if self._changes[each.path] == _FOLLOWED_FROM]
        known = [each for each in self._followed if type(each.home.get(each.name)) is float]
        for places in (known + new, known) if new else (known,):
            names = ", ".join(each.path for each in places)
            try:
                with following(places):
                    call = self._captured(args, kwargs, f"it takes {names} anew") if places else None
            except (MemfitError, ValueError) as error:
                log.info("%s cannot be taken anew by every call: %s", names, error)
            else:
                self._followed = places
                return call
        return None

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any], why: str = "") -> Call:
        log.info("capturing a new kind of call to %s%s", type(self._model).__name__, f": {why}" if why else "")
        start = time.monotonic()
        try:
            with alone(), removed(self._model), self._without_wrappers():
                call = self.compile_call(self._model, args, kwargs)
        except InfeasibleBudget as error:
            if not why:
                raise
            raise error.after(f"This call of {type(self._model).__name__} is of a new kind ({why})") from error
        self.capture_s += time.monotonic() - start
        return call

    def _fails_by_itself(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the original forward raises an error of its own; nothing of that run remains."""
        try:
            with (
                removed(self._model),
                self._without_wrappers(),
                torch.no_grad(),
                nothing_remains(self._model, cut_off(args, kwargs)),
            ):
                self.original(*args, **kwargs)
        except MemfitError as error:  # of a model with hooks, which are left out
            return error.__cause__ is not None and not isinstance(error.__cause__, MemfitError)
        except Exception:
            return True
        return False

    def _advise(self, why: str) -> None:
        """Say once what to do about calls that are captured again and again."""
        if self.whole is not None:
            return  # what a region is given is not the user's to choose
        self._reasons[why.partition(" was ")[0]] += 1
        subject, count = self._reasons.most_common(1)[0]
        if count != _TOO_MANY or not why.startswith(subject):
            return
        advice = "hold it in a buffer, which a captured call reads anew"
        if subject.startswith(ASKED):
            advice = "let the loop decide that, and tell the model by a number or another module"
        if subject.startswith("the shape of"):
            advice = "pad batches to a few lengths: buckets = memfit.Buckets.of(lengths), then buckets.pad(batch)"
        warnings.warn(
            f"{type(self._model).__name__} was captured {count} times more because {subject} changes from call to call "
            f"({self.capture_s:.1f} s so far): {advice}",
            stacklevel=4,
        )

    def _why(self, kind: Any, modules: list[nn.Module], leaves: list[Any]) -> str:
        """In which way a call differs from those that were captured before."""
        of_kind = self.calls.get(kind)
        if of_kind:
            return of_kind[-1].guards.change() or of_kind[-1].questions.change(leaves)
        if not self.calls:
            return ""
        names = [*(name for name, _ in self._model.named_parameters(remove_duplicate=False))]
        names += [name for name, _ in self._model.named_buffers(remove_duplicate=False)]
        names += [f"argument {place}" for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        return difference(next(reversed(self.calls)), kind, names, modules)

    @contextlib.contextmanager
    def _without_wrappers(self) -> Iterator[None]:
        """The original forward alone: what others put around ours is running already; other threads wait."""
        outermost = self._model.__dict__.pop("forward", None)
        gate = self._model.__dict__["forward"] = Gate(self.original, self)
        try:
            yield
        finally:
            self._model.__dict__.pop("forward", None)
            if outermost is not None:
                self._model.__dict__["forward"] = outermost
            gate.open()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlannedForward":
        model = memo.get(id(self._model))
        if model is None:
            raise ExecutionError("a planned forward cannot be copied without its module; copy the module")
        twin = object.__new__(PlannedForward)
        memo[id(self)] = twin
        twin.calls, twin._last, twin._before = {}, None, None  # its modules are others
        twin.compile_call = self.compile_call
        twin.whole = None if self.whole is None else memo.get(id(self.whole))
        twin.active, twin.capture_s, twin.runs = self.active, 0.0, 0
        twin._reasons, twin._said, twin._changes, twin._followed = Counter(), set(), Counter(), []
        twin._model = model
        twin._instance_forward = copy.deepcopy(self._instance_forward, memo)
        functools.update_wrapper(twin, twin.original)
        return twin

    def __reduce__(self) -> Any:
        """A model that is saved whole is saved as it is without memfit."""
        if self._instance_forward is not None:
            return _same, (self._instance_forward,)
        return getattr, (self._model, "forward")  # read before the attributes of the loaded model are there


def _like(of_kind: Sequence[Call], leaves: list[Any]) -> Call | None:
    """Return the captured call that has read the values which are there now, and is for such arguments."""
    return next((each for each in of_kind if each.guards.hold() and each.questions.hold(leaves)), None)


def _same(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
