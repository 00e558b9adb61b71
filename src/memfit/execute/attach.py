"""Put captured calls behind a module's own forward, and take them away again.

Note [Drop-in]
    Only the attribute `forward` of the instance changes: class, parameters, buffers, `state_dict`
    keys and hooks of the module stay what they are. In `eval()`, under `no_grad` and where nothing
    requires a gradient, the original forward runs. Hooks of inner modules are part of the captured
    call: they run when it is captured, not in every step.

Note [Kinds of calls]
    A captured call is right for every call that is like the one it was captured from: the same
    modules in the same modes, parameters and buffers of the same layout, arguments of the same
    layout and the same constants, the same tensors given twice, the same autocast. Plain Python
    attributes of modules (`dropout.p`) are not among them: they are read when a call is captured.

Note [Regions]
    A model that cannot be captured whole runs by itself, and some of its parts through memfit. Each
    of them knows the model it is a region of, so that it is removed with the others.
"""

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memfit.capture.outputs import is_constant
from memfit.errors import ExecutionError, InvalidInput

log = logging.getLogger(__name__)


class Call(Protocol):
    """One kind of call, ready to run on parameters and buffers (`states`) and arguments."""

    def __call__(self, states: Sequence[torch.Tensor], args: Any, kwargs: Any, /) -> Any: ...


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
    if is_planned(model):
        model.__dict__["forward"].restore()
    for forward in regions_of(model):
        forward.restore()
    return model


def regions_of(model: nn.Module) -> list["PlannedForward"]:
    """The forwards of the parts that were attached as regions of a model."""
    forwards = [module.__dict__["forward"] for module in model.modules() if is_planned(module)]
    return [forward for forward in forwards if forward.whole is model]


def planned_forwards(model: nn.Module) -> list["PlannedForward"]:
    """What `remove` would take away: `put_back` undoes that."""
    return [*([model.__dict__["forward"]] if is_planned(model) else []), *regions_of(model)]


def put_back(forwards: Sequence["PlannedForward"]) -> None:
    """Let modules run through memfit again."""
    for forward in forwards:
        forward.put_back()


@contextlib.contextmanager
def removed(model: nn.Module) -> Iterator[None]:
    """Run a module and its parts by their own forwards for a while."""
    planned = [(module, module.__dict__["forward"]) for module in model.modules() if is_planned(module)]
    for _, forward in planned:
        forward.restore()
    try:
        yield
    finally:
        for module, forward in planned:
            module.__dict__["forward"] = forward


def is_planned(module: nn.Module) -> bool:
    """Whether a module runs through memfit."""
    return isinstance(module.__dict__.get("forward"), PlannedForward)


class PlannedForward:
    """Stands in for a module's forward, see Note [Drop-in]."""

    def __init__(self, model: nn.Module, compile_call: Compile, whole: nn.Module | None = None) -> None:
        self.calls: dict[Any, Call] = {}
        self.compile_call = compile_call
        self.whole = whole
        self._model = model
        self._instance_forward = model.__dict__.get("forward")  # set if somebody replaced it before us
        functools.update_wrapper(self, self.original)

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that runs without memfit."""
        forward: Callable[..., Any] = self._instance_forward or type(self._model).forward.__get__(self._model)
        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        modules, states = _parts(self._model)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not self._model.training or not torch.is_grad_enabled() or not _requires_grad(states, leaves):
            return self.original(*args, **kwargs)
        key = _kind_of_call(modules, states, leaves, spec)
        call = self.calls.get(key)
        if call is None:
            call = self.calls[key] = self._captured(args, kwargs)
        return call(states, args, kwargs)

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture this kind of call, so that the next one of it runs at once."""
        modules, states = _parts(self._model)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        self.calls[_kind_of_call(modules, states, leaves, spec)] = self._captured(args, kwargs)

    def restore(self) -> None:
        del self._model.__dict__["forward"]
        if self._instance_forward is not None:
            self._model.__dict__["forward"] = self._instance_forward

    def put_back(self) -> None:
        self._model.__dict__["forward"] = self

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        log.info("capturing a new kind of call to %s", type(self._model).__name__)
        with removed(self._model):
            return self.compile_call(self._model, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlannedForward":
        model = memo.get(id(self._model))
        if model is None:
            raise ExecutionError("a planned forward cannot be copied without its module; copy the module")
        twin = object.__new__(PlannedForward)
        memo[id(self)] = twin
        twin.calls = {}  # its modules are others
        twin.compile_call = self.compile_call
        twin.whole = None if self.whole is None else memo.get(id(self.whole))
        twin._model = model
        twin._instance_forward = copy.deepcopy(self._instance_forward, memo)
        functools.update_wrapper(twin, twin.original)
        return twin

    def __reduce__(self) -> Any:
        raise ExecutionError(
            "a module that runs through memfit cannot be pickled whole; save model.state_dict(), "
            "or call memfit.remove(model) first"
        )


def _parts(model: nn.Module) -> tuple[list[nn.Module], list[torch.Tensor]]:
    """All modules, and all parameters, then all buffers, in the order captured calls take them.

    Looked up at every call: users replace parts and tensors, and tie them.
    """
    modules: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        modules.append(module)
        waiting += [child for child in reversed(module._modules.values()) if child is not None]
    parameters = [state for module in modules for state in module._parameters.values() if state is not None]
    buffers = [state for module in modules for state in module._buffers.values() if state is not None]
    return modules, [*parameters, *buffers]


def _requires_grad(states: list[torch.Tensor], leaves: list[Any]) -> bool:
    return any(state.requires_grad for state in states) or any(
        leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor)
    )


def kind_of_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What two calls of one module have in common if they are of one kind, see Note [Kinds of calls]."""
    return _kind_of_call([], [], *pytree.tree_flatten((args, kwargs)))


def _kind_of_call(modules: list[nn.Module], states: list[torch.Tensor], leaves: list[Any], spec: Any) -> Any:
    """See Note [Kinds of calls]."""
    first_place: dict[int, int] = {}
    tensors = [*states, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
    return (
        tuple(modules),
        tuple([module.training for module in modules]),
        tuple([_layout(tensor) for tensor in tensors]),
        tuple([first_place.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]),
        tuple([None if isinstance(leaf, torch.Tensor) else _constant(leaf) for leaf in leaves]),
        spec,
        _autocast(),
    )


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _constant(leaf: Any) -> Any:
    if not is_constant(leaf):
        raise InvalidInput(
            f"an argument of type {type(leaf).__name__} was given, which may change from call to call without being "
            "seen; pass tensors, numbers and strings, or containers of them"
        )
    return type(leaf), leaf.hex() if isinstance(leaf, float) else leaf


def _autocast() -> Any:
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    dtypes = tuple([(device, torch.get_autocast_dtype(device)) for device in devices])
    return dtypes, bool(devices) and torch.is_autocast_cache_enabled()
