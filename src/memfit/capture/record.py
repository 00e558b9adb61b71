"""What a trace cannot see by itself: who called an operator, from where, and how.

A `Recorder` sits above the trace while the model's forward runs. It marks every node with
the module path, the user's source line and whether the operator worked in place, and it
answers questions about values that do not depend on the batch.

Note [Known values]
    Libraries branch on tensors that are constants in disguise (transformers compares an
    `arange` with itself to find packed sequences). Values made from nothing but factory
    calls are the same in every step, so the Recorder computes them beside the trace and
    answers `bool(x)` and `x.item()` from them. Values that depend on the batch, on
    parameters or on a generator are never known: a question about one fails the capture, but for comparisons
    with what bounds it, see Note [Draws between 0 and 1] in `uniform.py`.
"""

import dataclasses
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from memfit import _torch
from memfit.capture.checks import is_check, refuse_check
from memfit.capture.eager_calls import (
    drawn,
    made_from_draws,
    refuse_casts_inside,
    refuse_other_formulas,
    statistics_written,
    with_statistics_apart,
    written,
)
from memfit.capture.questions import Answers
from memfit.capture.uniform import UniformDraws
from memfit.tensors import storage_key, tensors_in

ANNOTATION = "memfit"
_LARGEST_KNOWN_NUMEL = 2**20
_WRITE_OUT = torch.ops.aten.lift_fresh.default  # what torch.tensor([1, 2]) ends with
_LIBRARY_FOLDERS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
)
_CHECKPOINT_CODE = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
_CALLERS = tuple(os.path.join(os.path.dirname(__file__), name) for name in ("trace.py", "eager_step.py"))


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """What the Recorder knows of one operator call."""

    module: str
    source: str
    in_place: bool
    checkpoint: int | None = None  # which call of torch.utils.checkpoint it happened in


class ModuleStack:
    """The path of the module whose forward is running."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._paths = {id(module): path for path, module in root.named_modules()}
        self._running: list[str] = []
        self._thread = threading.get_ident()  # hooks are global: other threads may run other models

    @property
    def innermost(self) -> str:
        return self._running[-1] if self._running else ""

    @contextmanager
    def following(self) -> Iterator[None]:
        # An exception skips the exit hooks, so that `innermost` still names the module
        # that failed; the list starts empty with every call.
        self._running.clear()
        enter = register_module_forward_pre_hook(self._enter)
        leave = register_module_forward_hook(self._leave)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        path = self._paths.get(id(module))
        self._running.append(self.innermost if path is None else path)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._running.pop()


class KnownValues:
    """Real values of tensors that do not depend on the batch, see Note [Known values]."""

    def __init__(self) -> None:
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._uniform = UniformDraws()
        self._spoiled: set[int] = set()  # storages overwritten with something unknown

    def remember(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Take the value of a tensor for known."""
        self._values[tensor] = value

    def answer(self, tensor: torch.Tensor) -> Any | None:
        value = self._lookup(tensor)
        if value is None:
            return None
        with _torch.no_modes():
            return value.item()

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a tensor in memory of its own, if it is known."""
        value = self._lookup(tensor)
        if value is None:
            return None
        with _torch.no_modes():
            return value.clone()

    def follow(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute beside the trace what `operator` made, if that is known."""
        if operator is _WRITE_OUT and type(args[0]) is torch.Tensor:
            with _torch.no_modes():
                self._values[result] = args[0].clone()  # the trace keeps the tensor itself as a constant
            return
        self._uniform.follow(operator, args, result)
        real = None if not _is_small(result) else self._computed(operator, args, kwargs)
        if real is None:
            self._spoil(operator, tensors_in((args, kwargs)))
            return
        self._note(result, real)

    def made(self, operator: Any, args: Any, kwargs: Any) -> Any | None:
        """Return what an operator makes whose shapes depend on values, without memory; None: these are not known."""
        real = self._computed(operator, args, kwargs)
        if real is None:
            return None
        result = pytree.tree_map_only(torch.Tensor, lambda each: torch.empty(each.shape, dtype=each.dtype), real)
        self._note(result, real)
        return result

    def _computed(self, operator: Any, args: Any, kwargs: Any) -> Any | None:
        compared = self._uniform.compared(operator, args)
        if compared is not None:
            with _torch.no_modes():
                return torch.full(args[0].shape, compared)
        known = [self._lookup(tensor) for tensor in tensors_in((args, kwargs))]
        if any(value is None for value in known) or draws(operator):
            return None
        values = iter(known)
        real_args, real_kwargs = pytree.tree_map(lambda leaf: _real(leaf, values), (args, kwargs))
        with _torch.no_modes(), torch.no_grad():
            return operator(*real_args, **real_kwargs)

    def _note(self, result: Any, real: Any) -> None:
        for leaf, value in zip(pytree.tree_leaves(result), pytree.tree_leaves(real), strict=True):
            if isinstance(leaf, torch.Tensor):
                self._values[leaf] = value
                if hasattr(leaf, "elem"):  # what a traced tensor wraps: tolist() asks there
                    self._values[leaf.elem] = value

    def _lookup(self, tensor: torch.Tensor) -> torch.Tensor | None:
        value: torch.Tensor | None = self._values.get(tensor)
        if value is None or value.untyped_storage().data_ptr() in self._spoiled:
            return None
        return value

    def _spoil(self, operator: Any, tensors: list[torch.Tensor]) -> None:
        if not operator._schema.is_mutable:
            return
        for tensor in tensors:
            value = self._values.get(tensor)
            if value is not None:
                self._spoiled.add(value.untyped_storage().data_ptr())


class Recorder(TorchDispatchMode):
    """Marks the nodes of a trace and answers questions about known values."""

    def __init__(
        self,
        modules: ModuleStack,
        ran: Callable[[FrameType], None],
        *,
        casts: Callable[[], bool],
        answers: Answers,
        runs: bool = True,
    ) -> None:
        """Store what is followed.

        `ran` is told which functions of the model's code run operators. `casts` tells whether there is autocast.
        `answers` are those to questions about arguments. `runs`: the trace is to run, so that it must do what the eager
        run does.
        """
        super().__init__()
        self._casts, self._runs = casts, runs
        self._modules = modules
        self._ran = ran
        self._answers = answers
        self._known = KnownValues()
        self._checkpoints: list[FrameType] = []  # kept, so that no later frame has the place of an earlier one

    def _caller(self) -> tuple[str, int | None, bool]:
        """The line of the model's code that is running, the checkpoint it runs in, and whether one draws anew."""
        frames = model_frames()
        for frame in frames:
            self._ran(frame)
        checkpoints = [frame for frame in frames if frame.f_code is _CHECKPOINT_CODE]
        outermost = checkpoints[-1] if checkpoints else None
        if outermost is not None and outermost not in self._checkpoints:
            self._checkpoints.append(outermost)
        number = None if outermost is None else self._checkpoints.index(outermost)
        return user_line(frames), number, any(not each.f_locals.get("preserve", True) for each in checkpoints)

    def known_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what a tensor is that depends on nothing but constants, see Note [Known values]."""
        return self._known.value_of(tensor)

    def _refuse_buffers(self, written: list[Any]) -> None:
        """Refuse writes into buffers in a checkpoint, which the eager run does once more in its backward pass."""
        buffers = {storage_key(each) for each in self._modules.root.buffers()}
        if any(isinstance(each, torch.Tensor) and storage_key(each) in buffers for each in written):
            raise ValueError(
                "a checkpoint writes into a buffer, which the eager run does once more in the backward pass (a "
                "BatchNorm then counts every batch twice)"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            answer = self._known.answer(args[0])
            if answer is None:
                answer = self._answers.answer(args[0], user_line(model_frames()))
            if answer is not None:
                return answer
        if self._runs and self._casts():
            refuse_casts_inside(func)
        if self._runs:
            refuse_other_formulas(func, args)
        if self._runs and is_check(func):
            refuse_check(self._known.answer(args[0]))
        source, checkpoint, draws_anew = self._caller()
        statistics = statistics_written(func, args) if self._runs else []
        if checkpoint is not None and self._runs and (func._schema.is_mutable or statistics):
            self._refuse_buffers([*_written(func, args), *statistics])
        if draws_anew and self._runs and is_drawing(func, args, kwargs):
            raise ValueError("a checkpoint with preserve_rng_state=False draws other numbers in its backward pass")
        mark = Mark(self._modules.innermost, source, _overwrites_first(func), checkpoint)
        with _torch.annotation({ANNOTATION: mark}):
            result = (with_statistics_apart if statistics else _call)(func, args, kwargs)
        self._known.follow(func, args, kwargs, result)
        self._answers.follow(func, args, kwargs, result, draws=draws(func), is_known=self._known.value_of)
        return result


def _call(operator: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator so that the trace keeps what the eager run does, see the Notes in `eager_calls.py`."""
    if draws(operator):
        return (drawn if _overwrites_first(operator) else made_from_draws)(operator, args, kwargs)
    return written(operator, args, kwargs) if _overwrites_first(operator) else operator(*args, **kwargs)


def model_frames() -> list[FrameType]:
    """What is running between here and the call of the model, innermost first."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in _CALLERS:
        frames.append(frame)
        frame = frame.f_back
    return frames


def user_line(frames: list[FrameType]) -> str:
    """The line of the model's code that is running, as `folder/file.py:12`.

    That is the innermost line outside torch; for a model made of nothing but torch's own
    modules, the innermost `forward`.
    """
    foreign = (frame for frame in frames if not in_library(frame.f_code.co_filename))
    forwards = (frame for frame in frames if frame.f_code.co_name == "forward")
    frame = next(foreign, None) or next(forwards, None)
    return "" if frame is None else short_line(frame.f_code.co_filename, frame.f_lineno)


def in_library(filename: str) -> bool:
    """Whether a file belongs to torch or to memfit rather than to the user."""
    return filename.startswith(_LIBRARY_FOLDERS) or filename.startswith("<frozen")


def short_line(filename: str, line: int) -> str:
    """A line of code without the folders that differ from machine to machine."""
    folder, name = os.path.split(filename)
    return f"{os.path.basename(folder)}/{name}:{line}" if folder else f"{name}:{line}"


def _overwrites_first(operator: Any) -> bool:
    arguments = operator._schema.arguments
    return bool(arguments) and arguments[0].is_write


def _written(operator: Any, args: Any) -> list[Any]:
    """Arguments that an operator writes into."""
    return [arg for arg, described in zip(args, operator._schema.arguments, strict=False) if described.is_write]


def draws(operator: Any) -> bool:
    """Whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def is_drawing(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws; fused attention does if it drops something."""
    return draws(operator) and _drop_probability(operator, args, kwargs) != 0.0


def _drop_probability(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what attention is told of dropout; None for all else, and where it is not a number."""
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return given if isinstance(given, int | float) else None
    return None


def _real(leaf: Any, values: Iterator[torch.Tensor | None]) -> Any:
    """Take known values for tensors; they stay on the CPU, whatever device the model is for."""
    if isinstance(leaf, torch.Tensor):
        return next(values)
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _is_small(result: Any) -> bool:
    tensors = tensors_in(result)
    return bool(tensors) and all(tensor.numel() <= _LARGEST_KNOWN_NUMEL for tensor in tensors)
