"""Hooks: on modules, tensors and parameters, put there before the fit and after it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from patterns.models import Net
from patterns.pattern import LEFT, Pattern, State, fit_with_room, loss_of

CLIP = 1.0


class Parts(nn.Module):
    """Parts in parts, so that something is left to plan around hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32)),
            nn.Sequential(nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, 16)),
        )
        self.head = nn.Linear(16, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(batch)))


def record(state: State, tensor: torch.Tensor) -> None:
    state.seen = [*getattr(state, "seen", []), tensor.detach().clone()]


def reads(state: State, module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: record(state, output))


def reads_before(state: State, module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, args: record(state, args[0]))


def changes(state: State, module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: output * 1.5)


def changes_before(state: State, module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


def reads_gradients(state: State, module: nn.Module) -> None:
    module.register_full_backward_hook(lambda module, inputs, outputs: record(state, outputs[0]))


def changes_gradients(state: State, module: nn.Module) -> None:
    module.register_full_backward_hook(
        lambda module, inputs, outputs: tuple(None if e is None else 2 * e for e in inputs)
    )


def on_all_parameters(state: State) -> None:
    for parameter in state.model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def after_accumulation(state: State) -> None:
    """Keep all gradients by name, and the names in the order in which they come."""
    state.gradients = {name: [] for name, _ in state.model.named_parameters()}
    state.order = []

    def register(name: str, parameter: nn.Parameter) -> None:
        def keep(parameter: nn.Parameter) -> None:
            state.gradients[name].append(parameter.grad.clone())
            state.order.append(name)

        parameter.register_post_accumulate_grad_hook(keep)

    for name, parameter in state.model.named_parameters():
        register(name, parameter)


def update_in_backward(state: State) -> None:
    """An optimizer for each parameter, which steps and forgets the gradient as soon as it is there."""
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in state.model.parameters()}

    def update(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in state.model.parameters():
        each.register_post_accumulate_grad_hook(update)


def on_output_step(state: State, batch: torch.Tensor, number: int) -> float:
    state.optimizer.zero_grad()
    output = state.model(batch)
    output.register_hook(lambda gradient: gradient * 3)
    output.retain_grad()
    loss = loss_of(output, batch)
    loss.backward()
    record(state, output.grad)
    state.optimizer.step()
    return loss.item()


class HooksInside(Net):
    """Clips the gradient of a value inside, by a number that is a global."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * CLIP)
        return torch.sigmoid(hidden)


class RecordsInside(Net):
    """Keeps gradients of a value inside, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[torch.Tensor] = []

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.gradients.append(gradient.norm().detach()))
        return torch.sigmoid(hidden)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -CLIP * gradient


class ReversesGradients(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(Reversed.apply(hidden))


def set_clip(value: float) -> None:
    global CLIP
    CLIP = value


def changing_clip(name: str, make: Any, **fields: Any) -> Pattern:
    return Pattern(
        name=name,
        make=make,
        change=lambda state, number: set_clip(1.0 + number // 5),
        end=lambda state: set_clip(1.0),
        **fields,
    )


def seen(state: State) -> Any:
    return getattr(state, "seen", [])


def inner(state: State) -> nn.Module:
    return state.model.body[0]


def root(state: State) -> nn.Module:
    return state.model


Register = Callable[[State, nn.Module], None]


def both(
    name: str,
    register: Register,
    of: Callable[[State], nn.Module] = inner,
    *,
    slow: bool = False,
) -> list[Pattern]:
    """A hook that is registered before the fit, and one after it."""
    return [
        Pattern(
            name=f"{name}, registered before the fit",
            make=Parts,
            before_fit=lambda state: register(state, of(state)),
            beside=seen,
            slow=slow,
        ),
        Pattern(
            name=f"{name}, registered after the fit",
            make=Parts,
            fit=fit_with_room,  # what is around the hook cannot be planned
            start=lambda state: register(state, of(state)),
            beside=seen,
            slow=slow,
        ),
    ]


PATTERNS = [
    *both("a forward hook that reads", reads, slow=True),
    *both("a forward hook that changes the output", changes, slow=True),
    *both("a forward pre-hook that reads", reads_before, slow=True),
    *both("a forward pre-hook that changes the input", changes_before, slow=True),
    *both("a full backward hook that reads", reads_gradients, slow=True),
    *both("a full backward hook that changes gradients", changes_gradients, slow=True),
    *both("a forward hook on the model itself", changes, root),
    *both("a full backward hook on the model itself", reads_gradients, root),
    Pattern(name="a tensor hook on the output, and retain_grad", make=Parts, step=on_output_step, beside=seen),
    Pattern(name="hooks on parameters that clamp gradients", make=Parts, start=on_all_parameters),
    Pattern(
        name="post-accumulate-grad hooks that read",
        make=Parts,
        start=after_accumulation,
        beside=lambda state: state.gradients,
    ),
    Pattern(
        name="the order in which post-accumulate-grad hooks run",
        make=Parts,
        start=after_accumulation,
        beside=lambda state: state.order,
    ),
    Pattern(name="parameters updated in the backward pass by hooks", make=Parts, start=update_in_backward),
    changing_clip("a tensor hook in the forward that reads a global, changed", HooksInside),
    changing_clip(
        "an autograd.Function whose backward reads a global, changed",
        ReversesGradients,
    ),
    Pattern(
        name="a tensor hook in the forward that records gradients",
        make=RecordsInside,
        start=lambda state: state.model.gradients.clear(),
        beside=lambda state: state.model.gradients,
        outcome=LEFT + "a hook or a function of the backward pass changes gradients",
    ),
]
