"""Do in forwards what they do beside computing: draw, count, keep, append, look at values."""

import math
import threading
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from patterns.models import Net
from patterns.pattern import LEFT, Pattern, State, features, loss_of

CALLS = 0
COUNTS = {"calls": 0}
LOG: list[Any] = []
LOCAL = threading.local()


class Holding(Net):
    """Keeps something on self."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.losses: list[torch.Tensor] = []
        self.mask: torch.Tensor | None = None
        self.aux: torch.Tensor | None = None
        self.mean: Any = 0.0
        self.register_buffer("seen", torch.zeros(32))
        self.cache: dict[Any, torch.Tensor] = {}


class Counts(Holding):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.sigmoid(hidden)


class CountsAndScales(Holding):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.sigmoid(hidden) / math.sqrt(self.calls)


class AppendsLosses(Holding):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.losses.append(hidden.square().mean())
        return torch.sigmoid(hidden)


class KeepsAux(Holding):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.aux = hidden.square().mean()
        return torch.sigmoid(hidden)


class CachesMask(Holding):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(hidden.shape[-1], 32).tril(-4)
        return torch.sigmoid(hidden) @ self.mask


class CachesMaskByShape(Holding):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        key = (hidden.shape, hidden.dtype)
        if key not in self.cache:
            self.cache[key] = torch.linspace(0, 1, hidden.shape[-1])
        return torch.sigmoid(hidden) * self.cache[key]


class KeepsRunningMean(Holding):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return torch.sigmoid(hidden - self.mean)


class UpdatesBuffer(Holding):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return torch.sigmoid(hidden - self.seen)


class ReplacesBuffer(Holding):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen = 0.9 * self.seen + 0.1 * hidden.detach().mean(0)
        return torch.sigmoid(hidden - self.seen)


class CountsGlobally(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS += 1
        return torch.sigmoid(hidden)


class CountsInDict(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        COUNTS["calls"] += 1
        return torch.sigmoid(hidden)


class AppendsToGlobal(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        LOG.append(hidden.shape[0])
        return torch.sigmoid(hidden)


class AppendsTensorToGlobal(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        LOG.append(hidden.detach().mean())
        return torch.sigmoid(hidden)


class KeepsThreadLocal(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
        return torch.sigmoid(hidden)


class LooksAtValues(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) if hidden.mean() > 0 else torch.relu(hidden)


class SkipsGradients(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = hidden.abs().amax(-1, keepdim=True)
        return hidden / scale + hidden.detach().sin()


class Checkpointed(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.blocks, hidden, use_reentrant=False)

    def blocks(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(torch.sigmoid(hidden), 0.2)


class CheckpointedTheOldWay(Checkpointed):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.blocks, hidden, use_reentrant=True)


class ThroughNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        return torch.from_numpy(np.sin(hidden.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (hidden,) = ctx.saved_tensors
        return gradient * torch.from_numpy(np.cos(hidden.numpy()))


class UsesNumpy(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return ThroughNumpy.apply(hidden)


class Unregistered(Net):
    """Has a layer in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_layers = [nn.Linear(32, 32)]

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.hidden_layers[0](hidden)


class PlainTensor(Net):
    """Has a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.linspace(0, 1, 32)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.scale


def aux_step(state: State, batch: torch.Tensor, number: int) -> float:
    """A step whose loss has what the forward has left on the model."""
    model = state.model
    model.losses.clear()
    state.optimizer.zero_grad()
    loss = loss_of(model(batch), batch)
    loss = loss + 0.1 * sum(model.losses) + (0 if model.aux is None else 0.1 * model.aux)
    loss.backward()
    state.optimizer.step()
    return loss.item()


def forget() -> None:
    """Give the globals of this page their first values."""
    global CALLS
    CALLS = 0
    COUNTS["calls"] = 0
    LOG.clear()
    LOCAL.calls = 0


def fresh(make: Any) -> Any:
    def made() -> nn.Module:
        forget()
        return make()

    return made


def written(state: State) -> Any:
    return CALLS, COUNTS, LOG, LOCAL.calls


def writes_globals(name: str, make: Any, **fields: Any) -> Pattern:
    return Pattern(name=name, make=fresh(make), start=lambda state: forget(), beside=written, **fields)


def short_last(number: int) -> torch.Tensor:
    return features(number)[: 32 if number < 19 else 20]


PATTERNS = [
    Pattern(
        name="a counter on self",
        make=Counts,
        beside=lambda state: state.model.calls,
        outcome=LEFT + "the forward reads calls and writes it",
    ),
    Pattern(
        name="a counter on self that scales the output",
        make=CountsAndScales,
        beside=lambda state: state.model.calls,
        outcome=LEFT + "the forward reads calls and writes it",
    ),
    Pattern(
        name="an auxiliary loss appended to self.losses",
        make=AppendsLosses,
        step=aux_step,
        beside=lambda state: state.model.losses,
    ),
    Pattern(name="an auxiliary loss kept on self", make=KeepsAux, step=aux_step, beside=lambda state: state.model.aux),
    Pattern(name="a mask cached on self, None at first", make=CachesMask),
    Pattern(
        name="a mask cached on self, None at first, and a smaller last batch",
        make=CachesMask,
        batch=short_last,
        outcome=LEFT + "a tensor is used that is neither a parameter, a buffer nor an argument",
    ),
    Pattern(
        name="a mask cached in a dict on self, by shape",
        make=CachesMaskByShape,
        batch=short_last,
    ),
    Pattern(
        name="a running mean kept as a plain attribute",
        make=KeepsRunningMean,
        beside=lambda state: state.model.mean,
        outcome=LEFT + "the forward reads mean and writes it",
    ),
    Pattern(name="a buffer updated in place by the forward", make=UpdatesBuffer),
    Pattern(name="a buffer replaced by the forward", make=ReplacesBuffer),
    writes_globals(
        "a global counter written by the forward",
        CountsGlobally,
        outcome=LEFT + "the forward reads CALLS and writes it",
    ),
    writes_globals(
        "a counter in a global dict written by the forward",
        CountsInDict,
    ),
    writes_globals(
        "a number appended to a global list by the forward",
        AppendsToGlobal,
    ),
    writes_globals(
        "a tensor appended to a global list by the forward",
        AppendsTensorToGlobal,
    ),
    writes_globals(
        "a counter in a threading.local written by the forward",
        KeepsThreadLocal,
        outcome=LEFT + "the forward reads LOCAL.calls and writes it",
    ),
    Pattern(
        name="a branch on values of the batch",
        make=LooksAtValues,
        outcome=LEFT + "the code asks for the value of a tensor",
    ),
    Pattern(name="no_grad and detach in the forward", make=SkipsGradients),
    Pattern(
        name="torch.utils.checkpoint in the forward",
        make=Checkpointed,
        slow=True,
    ),
    Pattern(
        name="a reentrant checkpoint in the forward",
        make=CheckpointedTheOldWay,
        outcome=LEFT + "a reentrant checkpoint cannot be followed",
    ),
    Pattern(
        name="NumPy in an autograd.Function",
        outcome=LEFT + "computes with NumPy",
        make=UsesNumpy,
    ),
    Pattern(
        name="a layer in a plain list, not registered",
        make=Unregistered,
        beside=lambda state: state.model.hidden_layers[0],
        outcome=LEFT + "neither a parameter, a buffer nor an argument",
    ),
    Pattern(
        name="a tensor on self that is no buffer",
        make=PlainTensor,
        outcome=LEFT + "neither a parameter, a buffer nor an argument",
    ),
]
