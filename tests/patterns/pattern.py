"""A usage pattern: a model and a training loop as people write them, run plainly and run fitted, then compared."""

import dataclasses
import random
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

import memfit

STEPS = 20
EQUAL = "equal"
LEFT = "left as it is: "  # and equal
REFUSED = "refused: "
DIFFERENT = "DIFFERENT: "
CRASHED = "CRASHED: "


class State(SimpleNamespace):
    """Hold `model`, `optimizer`, and what a pattern puts beside them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def features(number: int) -> torch.Tensor:
    """The batch of a step: 32 samples of 16 numbers."""
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(number))


def loss_of(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch[:, : output.shape[1]])


def usual_step(state: State, batch: torch.Tensor, number: int) -> float:
    """One step as most loops have it."""
    state.optimizer.zero_grad()
    loss = loss_of(state.model(batch), batch)
    loss.backward()
    state.optimizer.step()
    return loss.item()


def step_of(loss: Any, *, clip: bool = False, set_to_none: bool = True) -> Any:
    """A step with a loss of its own."""

    def step(state: State, batch: Any, number: int) -> float:
        state.optimizer.zero_grad(set_to_none=set_to_none)
        value = loss(state, batch, number)
        value.backward()
        if clip:
            nn.utils.clip_grad_norm_(state.model.parameters(), 0.05)
        state.optimizer.step()
        return value.item()

    return step


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def fit(model: nn.Module, sample: Any) -> nn.Module:
    return memfit.fit(model, sample, "smallest", time_limit=1, progress=False)


def fit_the_model(state: State, sample: Any) -> None:
    fit(state.model, sample)


def fit_with_room(state: State, sample: Any) -> None:
    """For patterns whose step comes to need more than that of the sample."""
    memfit.fit(state.model, sample, "1MiB", time_limit=1, progress=False)


def nothing(state: State) -> None:
    """Do nothing, where a pattern has nothing to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pattern:
    """One way people train. `outcome` is "equal", or a part of the sentence it is refused with.

    Of a model that trains equal because nothing of it is planned, it is `LEFT` and a part of the warning.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Any] = features
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw
    before_fit: Callable[[State], None] = nothing
    fit: Callable[[State, Any], None] = fit_the_model
    start: Callable[[State], None] = nothing  # after the fit, before the loop
    change: Callable[[State, int], None] = lambda state, number: None  # before every step
    step: Callable[[State, Any, int], float] = usual_step
    beside: Callable[[State], Any] = nothing  # what is compared beside the model, the optimizer and the generators
    end: Callable[[State], None] = nothing
    outcome: str = EQUAL
    fails: str = ""  # what goes wrong as yet, neither equal nor refused in a sentence
    slow: bool = False


def train(pattern: Pattern, *, fitted: bool) -> dict[str, Any]:
    """Train for 20 steps; all there is to compare, as plain data."""
    _seed(0)
    state = State(model=pattern.make())
    pattern.before_fit(state)
    batches = [pattern.batch(number) for number in range(STEPS)]
    found = {}
    if fitted:
        before = _generators()
        pattern.fit(state, batches[0])
        found["the generators after the fit"] = _generators() == before
    else:
        found["the generators after the fit"] = True
    state.optimizer = pattern.optimizer(state.model.parameters())
    try:
        _seed(1)
        pattern.start(state)
        found["the losses"] = []
        for number, batch in enumerate(batches):
            pattern.change(state, number)
            found["the losses"].append(plain(pattern.step(state, batch, number)))
        found |= _compared(pattern, state)
    finally:
        pattern.end(state)
    return found


def _compared(pattern: Pattern, state: State) -> dict[str, Any]:
    named = dict(state.model.named_parameters())
    return {
        "the generators": _generators(),
        **{f"the parameter {name}": plain(each) for name, each in named.items()},
        **{f"the gradient of {name}": plain(each.grad) for name, each in named.items()},
        **{f"the buffer {name}": plain(each) for name, each in state.model.named_buffers()},
        "the state of the optimizer": plain(state.optimizer.state_dict()),
        "what is beside": plain(pattern.beside(state)),
    }


def outcome_of(pattern: Pattern) -> str:
    """Fit the model, train it so, and say what comes of it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        eager = train(pattern, fitted=False)
        try:
            fitted = train(pattern, fitted=True)
        except memfit.MemfitError as error:
            return f"{REFUSED}{error}"
        except Exception as error:
            return f"{CRASHED}{type(error).__name__}: {error}"
    differences = [name for name in eager.keys() | fitted.keys() if eager.get(name) != fitted.get(name)]
    if differences:
        return DIFFERENT + ", ".join(sorted(differences))
    left = next((str(each.message) for each in said if "is left as it is" in str(each.message)), "")
    return f"{LEFT}{left}" if left else EQUAL


def plain(value: Any) -> Any:
    """Anything a loop holds as data that is equal if and only if all bits are."""
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, nn.Module):
        return [plain(value.state_dict()), [plain(each.grad) for each in value.parameters()]]
    if isinstance(value, Mapping):
        return [(plain(key), plain(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | set):
        return [plain(each) for each in value]
    return value if isinstance(value, int | str | bytes | None) else repr(value)


def _plain_tensor(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return ("sparse", plain(tensor.indices()), plain(tensor.values()))
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return (str(tensor.dtype), tuple(tensor.shape), content)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _generators() -> Any:
    return [plain(torch.get_rng_state()), random.getstate(), plain(np.random.get_state())]


_INSIDES = (
    "aot_autograd",
    "FakeTensor",
    "FunctionalTensor",
    "SparseTensorImpl",
    "dynamo",
    "functorch",
    "tensor subclasses",
    "KNOWN_TYPES",
)


def is_sound(outcome: str) -> bool:
    """Return whether it is equal, or warned of or refused in a sentence that does not speak of torch's insides."""
    is_said = outcome.startswith((REFUSED, LEFT))
    return outcome == EQUAL or (is_said and not any(each in outcome for each in _INSIDES))
