"""Tell calls apart that need captures of their own.

Note [Kinds of calls]
    A captured call is right for every call that is like the one it was captured from: the same modules in the same
    modes, parameters and buffers of the same layout, arguments of the same layout and the same constants, the same
    tensors, lists and dictionaries given twice, autocast, the default dtype, deterministic algorithms and the kernels
    of attention set alike. What the model's code has read beside these (`dropout.p`, a global) is compared too, see
    `capture/guards.py`; of one kind there may be several captured calls that have read different values.

Note [Like the last call]
    As a rule a call is of the kind of the one before. From the second of a kind in a row on, what was looked at is
    kept, without the tensors, and compared in few and quick steps; only if something differs the kind is written down
    and looked up. A batch that is also a parameter, or given twice, is always looked up.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memfit import _torch
from memfit.accelerator import kinds
from memfit.capture.arguments import containers_in, pattern_of
from memfit.capture.outputs import is_constant
from memfit.errors import InvalidInput
from memfit.execute.call import Call
from memfit.execute.inner_outputs import REFUSED
from memfit.trees import flatten

_PLAIN = (torch.Tensor, nn.Parameter)
_own_attributes = operator.attrgetter("__dict__")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastCall:
    """What a call is compared with, see Note [Like the last call]."""

    call: Call
    modules: list[nn.Module]
    children: list[tuple[nn.Module | None, ...]]  # of each
    modes: list[bool]
    state_ids: list[int]
    different: list[int]  # places of states that are not one before
    are_laid_out_so: Callable[..., bool]  # the different states, then the arguments
    are_tensors: list[bool]  # of the arguments
    constants: list[Any]  # the other arguments
    spec: Any
    pattern: tuple[int, ...] | None  # which lists and dictionaries among the arguments are one; None: there are none
    settings: Any  # of torch

    @classmethod
    def of(
        cls,
        call: Call,
        modules: list[nn.Module],
        states: list[torch.Tensor],
        leaves: list[Any],
        spec: Any,
        containers: list[Any],
    ) -> "LastCall | None":
        """None if the next call is to be looked up whatever it is."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        state_ids = list(map(id, states))
        if not _are_others(tensors, state_ids):
            return None
        different = list({identity: place for place, identity in reversed(list(enumerate(state_ids)))}.values())
        return cls(
            call=call,
            modules=modules,
            children=_children(modules),
            modes=[module.training for module in modules],
            state_ids=state_ids,
            different=different,
            are_laid_out_so=_torch.layout_check([*(states[place] for place in different), *tensors]),
            are_tensors=[isinstance(leaf, torch.Tensor) for leaf in leaves],
            constants=[_constant(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)],
            spec=spec,
            pattern=pattern_of(containers) if containers else None,
            settings=_settings(),
        )

    def states(self, leaves: list[Any], spec: Any, args: Any, kwargs: Any) -> list[torch.Tensor] | None:
        """Parameters and buffers of a call with these arguments, if it is of the same kind."""
        if not torch.is_grad_enabled() or _children(self.modules) != self.children:
            return None
        states = _states(self.modules)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        same = (
            [module.training for module in self.modules] == self.modes
            and list(map(id, states)) == self.state_ids
            and spec == self.spec
            and (self.pattern is None or pattern_of(containers_in(args, kwargs)) == self.pattern)
            and [isinstance(leaf, torch.Tensor) for leaf in leaves] == self.are_tensors
            and _are_others(tensors, self.state_ids)
            and self.are_laid_out_so(*[states[place] for place in self.different], *tensors)
            and [_constant(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)] == self.constants
            and _settings() == self.settings
        )
        return states if same else None


def _are_others(tensors: list[torch.Tensor], state_ids: list[int]) -> bool:
    """Whether arguments are no states, and none is given twice."""
    ids = set(map(id, tensors))
    return len(ids) == len(tensors) and ids.isdisjoint(state_ids)


def _children(modules: list[nn.Module]) -> list[tuple[nn.Module | None, ...]]:
    return [(*module._modules.values(),) for module in modules]


def states_of(model: nn.Module) -> list[torch.Tensor]:
    """What captured calls of a module take beside the arguments."""
    return parts_of(model)[1]


def parts_of(model: nn.Module) -> tuple[list[nn.Module], list[torch.Tensor]]:
    """All modules, and all parameters, then all buffers, in the order captured calls take them.

    Users replace parts and tensors, and tie them.
    """
    modules: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        modules.append(module)
        waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return modules, _states(modules)


def _states(modules: list[nn.Module]) -> list[torch.Tensor]:
    parameters = [state for module in modules for state in module._parameters.values() if state is not None]
    buffers = [state for module in modules for state in module._buffers.values() if state is not None]
    return [*parameters, *buffers]


def requires_grad(states: list[torch.Tensor], leaves: list[Any]) -> bool:
    """Return whether a call has something to differentiate by."""
    return any(state.requires_grad for state in states) or any(
        leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor)
    )


def attributes_on(leaves: list[Any]) -> list[str]:
    """Return the names of what users have put on tensors, which is not in a trace."""
    marked = [_own_attributes(leaf) for leaf in leaves if type(leaf) in _PLAIN]  # others have attributes by their kind
    return [name for each in marked for name in each if not name.startswith("_") and name not in REFUSED]


def kind_of_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What two calls of one module have in common if they are of one kind, see Note [Kinds of calls]."""
    return kind_of_call([], [], *flatten((args, kwargs)), containers_in(args, kwargs))


def kind_of_call(
    modules: list[nn.Module], states: list[torch.Tensor], leaves: list[Any], spec: Any, containers: list[Any]
) -> Any:
    """See Note [Kinds of calls]."""
    first_place: dict[int, int] = {}
    tensors = [*states, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
    return (
        tuple(modules),
        tuple([module.training for module in modules]),
        tuple([_layout(tensor) for tensor in tensors]),
        (*[first_place.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)], *pattern_of(containers)),
        tuple([None if isinstance(leaf, torch.Tensor) else _constant(leaf) for leaf in leaves]),
        spec,
        _settings(),
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


def _settings() -> Any:
    devices = [device for device in kinds() if torch.is_autocast_enabled(device)]
    dtypes = tuple([(device, torch.get_autocast_dtype(device)) for device in devices])
    is_cached = bool(devices) and torch.is_autocast_cache_enabled()
    default = torch.get_default_dtype()
    return dtypes, is_cached, default, torch.are_deterministic_algorithms_enabled(), _torch.attention_settings()
