"""Put captured calls behind a module's own forward, and take them away again.

Note [Drop-in]
    Only the attribute `forward` of the instance changes: class, parameters, buffers, `state_dict`
    keys and hooks of the module stay what they are. In `eval()` and under `no_grad` the original
    forward runs. Hooks of inner modules are part of the captured call: they run when it is
    captured, not in every step.
"""

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memfit.errors import ExecutionError, InvalidInput
from memfit.execute.compiled import CompiledCall

log = logging.getLogger(__name__)

Compile = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], CompiledCall]


def attach(model: nn.Module, compile_call: Compile) -> "PlannedForward":
    """Run `model.forward` through captured calls, made by `compile_call` when a new kind of call comes."""
    if isinstance(model.__dict__.get("forward"), PlannedForward):
        raise InvalidInput(f"this {type(model).__name__} runs through memfit already; call memfit.remove(model) first")
    planned = PlannedForward(model, compile_call)
    model.forward = planned
    return planned


def remove(model: nn.Module) -> nn.Module:
    """Give a module its own forward back. A module that was never changed is returned as it is."""
    planned = model.__dict__.get("forward")
    if isinstance(planned, PlannedForward):
        planned.restore()
    return model


class PlannedForward:
    """Stands in for a module's forward, see Note [Drop-in]."""

    def __init__(self, model: nn.Module, compile_call: Compile) -> None:
        self.calls: dict[Any, CompiledCall] = {}
        self._compile_call = compile_call
        self._model = model
        self._instance_forward = model.__dict__.get("forward")  # set if somebody replaced it before us
        functools.update_wrapper(self, self.original)

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that runs without memfit."""
        forward: Callable[..., Any] = self._instance_forward or type(self._model).forward.__get__(self._model)
        return forward

    @functools.cached_property
    def _modules(self) -> list[nn.Module]:
        return list(self._model.modules())

    @functools.cached_property
    def _states(self) -> list[tuple[dict[str, Any], str]]:
        return _state_owners(self._model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._model.training or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        states = [registry[name] for registry, name in self._states]
        call = self.calls.get(self._key(states, args, kwargs)) or self.capture(args, kwargs)
        return call(states, args, kwargs)

    def restore(self) -> None:
        del self._model.__dict__["forward"]
        if self._instance_forward is not None:
            self._model.__dict__["forward"] = self._instance_forward

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledCall:
        """Capture this kind of call, so that the next one of it runs at once."""
        log.info("capturing a new kind of call to %s", type(self._model).__name__)
        self.restore()
        try:
            call = self._compile_call(self._model, args, kwargs)
        finally:
            self._model.__dict__["forward"] = self
        states = [registry[name] for registry, name in self._states]
        self.calls[self._key(states, args, kwargs)] = call
        return call

    def _key(self, states: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """What a captured call depends on; a call that differs in it is captured anew."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return (
            tuple([module.training for module in self._modules]),
            tuple([(state.requires_grad, state.dtype) for state in states]),
            tuple([_leaf_key(leaf) for leaf in leaves]),
            spec,
            _autocast_key(),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlannedForward":
        model = memo.get(id(self._model))
        if model is None:
            raise ExecutionError("a planned forward cannot be copied without its module; copy the module")
        # The copied module is still being filled: its parameters are looked up at the first call.
        twin = object.__new__(PlannedForward)
        memo[id(self)] = twin
        twin.calls = dict(self.calls)
        twin._compile_call = self._compile_call
        twin._model = model
        twin._instance_forward = copy.deepcopy(self._instance_forward, memo)
        functools.update_wrapper(twin, twin.original)
        return twin

    def __reduce__(self) -> Any:
        raise ExecutionError(
            "a module that runs through memfit cannot be pickled whole; save model.state_dict(), "
            "or call memfit.remove(model) first"
        )


def _state_owners(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where each parameter, then each buffer lives, in the order captured calls take them.

    Looked up at every call, because users put other tensors there (`load_state_dict(assign=True)`).
    """
    return [
        (module.__dict__[registry], name)
        for registry in ("_parameters", "_buffers")
        for _, module in model.named_modules(remove_duplicate=False)
        for name, state in module.__dict__[registry].items()
        if state is not None
    ]


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return type(leaf), leaf


def _autocast_key() -> Any:
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )
