"""Parts of parameters: what an optimizer is run on when it is not run on everything at once.

Note [Parts]
    An optimizer that works element by element is run on slices of a parameter, so that whatever comes and goes with
    an update (state that is read from a tier, fp32 copies for stochastic rounding, the optimizer's own temporaries)
    is never as big as the parameter. Its state has tensors like the parameter, which are cut likewise, and counters,
    which every slice must find as they were before the update: they are kept from the last slice. Other optimizers
    are run on whole parameters.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.optimizer_twin import empty_twin
from memfit.step.optimizers import is_elementwise
from memfit.step.rounding import StochasticRounding
from memfit.tensors import storage_key

LARGEST_PART = 2**18  # elements: a few of them fit a cache, and the overhead of a call is small beside one

State = dict[str, Any]  # of one parameter or part: tensors and numbers by name


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A slice of a flat parameter, or the whole of one."""

    parameter: nn.Parameter
    rows: slice | None  # of the flat parameter; None: the whole in its own shape

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same part of a tensor like the parameter."""
        return tensor.detach() if self.rows is None else tensor.detach().view(-1)[self.rows]


class Home(Protocol):
    """Where the state of a parameter is while its parts are updated."""

    def fetch(self, part: Part, following: Part | None) -> State:
        """The state of a part as it was before the update; `following` is what will be asked for next."""

    def keep(self, part: Part, state: State) -> None:
        """Take the state of a part as it is after the update."""

    def close(self) -> State:
        """The state of the whole parameter as the optimizer holds it."""


class MemoryHome:
    """State beside the parameter: parts of it are views, which the optimizer writes into."""

    def __init__(self, parameter: nn.Parameter, state: State) -> None:
        self._parameter = parameter
        self._state = state
        self._made: State = {}

    def fetch(self, part: Part, following: Part | None) -> State:
        return {name: cut(part, value) for name, value in self._state.items()}

    def keep(self, part: Part, state: State) -> None:
        for name, value in state.items():
            if part.rows is None or not is_like(part, value):
                self._made[name] = value
                continue
            whole = self._state.get(name)
            if whole is None:
                whole = self._made.setdefault(name, torch.empty_like(self._parameter.detach(), dtype=value.dtype))
            here = part.of(whole)
            if not _is_same_memory(here, value):
                here.copy_(value)

    def close(self) -> State:
        self._state.update(self._made)
        return self._state


class PartUpdates:
    """Runs an optimizer part by part, see Note [Parts]."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        home_of: Callable[[nn.Parameter, State], Home] = MemoryHome,
        rounding: StochasticRounding | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._worker = empty_twin(optimizer)
        self._home_of = home_of
        self._rounding = rounding
        self._in_slices = is_elementwise(optimizer)

    def update(self, parameter: nn.Parameter, then: nn.Parameter | None = None) -> None:
        """Update one parameter from its gradient; `then` is the one that is expected next."""
        gradient = parameter.grad
        assert gradient is not None
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether it has stepped
        group = self._group_of(parameter)
        home = self._home_of(parameter, self._optimizer.state.get(parameter, {}))
        parts = self.parts_of(parameter)
        following = [*parts[1:], None if then is None else self.parts_of(then)[0]]
        for part, next_part in zip(parts, following, strict=True):
            state = home.fetch(part, next_part)
            home.keep(part, self._step(group, part, gradient, state))
        self._optimizer.state[parameter] = home.close()

    def parts_of(self, parameter: nn.Parameter) -> list[Part]:
        gradient, size = parameter.grad, parameter.numel()
        dense = parameter.is_contiguous() and (gradient is None or _is_flat(gradient))
        if not self._in_slices or not dense or not size:
            return [Part(parameter=parameter, rows=None)]
        starts = range(0, size, LARGEST_PART)
        return [Part(parameter=parameter, rows=slice(at, min(at + LARGEST_PART, size))) for at in starts]

    def _step(self, group: dict[str, Any], part: Part, gradient: torch.Tensor, state: State) -> State:
        values, slope = part.of(part.parameter), part.of(gradient)
        if self._rounding is None or values.dtype is not torch.bfloat16:
            return self._run(group, values, slope, state)
        exact, slope = values.float(), slope.float()
        wide = {name: value.float() if _is_short(value) else value for name, value in state.items()}
        wide = self._run(group, exact, slope, wide)
        self._rounding.round_into(values, exact)
        return {name: self._rounded(part, value, state.get(name)) for name, value in wide.items()}

    def _rounded(self, part: Part, value: Any, place: torch.Tensor | None) -> Any:
        """A state like the parameter in the parameter's precision, as the optimizer by itself would have it."""
        assert self._rounding is not None
        if not is_like(part, value) or value.dtype is not torch.float32:
            return value
        rounded = torch.empty_like(value, dtype=torch.bfloat16) if place is None else place
        self._rounding.round_into(rounded, value)
        return rounded

    def _run(self, group: dict[str, Any], values: torch.Tensor, gradient: torch.Tensor, state: State) -> State:
        values.grad = gradient
        self._worker.param_groups = [{**group, "params": [values]}]
        self._worker.state = defaultdict(dict, {values: state} if state else {})
        self._worker.step()
        after: State = self._worker.state[values]
        self._worker.state = defaultdict(dict)
        self._worker.param_groups = []
        return after

    def _group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Looked up at every update: schedulers and users change the settings of groups."""
        for group in self._optimizer.param_groups:
            if any(each is parameter for each in group["params"]):
                return group
        raise KeyError("the parameter is in no group of the optimizer")


def is_like(part: Part, value: Any) -> bool:
    """Whether a state has the shape of the part it belongs to."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.shape == (part.parameter.shape if part.rows is None else part.of(part.parameter).shape)


def cut(part: Part, value: Any) -> Any:
    """The part of a whole state: a view of what is like the parameter, a copy of what is not."""
    if not isinstance(value, torch.Tensor) or part.rows is None:
        return value
    return part.of(value) if value.shape == part.parameter.shape and _is_flat(value) else value.clone()


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return storage_key(one) == storage_key(other) and one.storage_offset() == other.storage_offset()


def _is_flat(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous()


def _is_short(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16
