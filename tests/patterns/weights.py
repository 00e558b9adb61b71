"""Weights and gradients that are looked at, clamped, shared and laid out by hand."""

import threading

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from patterns.models import Net, Normed
from patterns.pattern import LEFT, Pattern, State, loss_of, step_of


class ClampsItself(Net):
    """Keeps its weights in a range, in the forward."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.second.weight.clamp_(-0.1, 0.1)
        return torch.sigmoid(hidden)


class ClampsByData(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.second.weight.data.clamp_(-0.1, 0.1)
        return torch.sigmoid(hidden)


class AssignsData(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.second.weight.data = nn.functional.normalize(self.second.weight.data, dim=1)
        return torch.sigmoid(hidden)


class Momentum(Net):
    """Has a slow copy of its first layer, moved in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(16, 32).requires_grad_(False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            target = torch.tanh(self.slow(batch))
        return self.second(torch.tanh(self.first(batch)) - target)


class CodeBook(Net):
    """Moves a buffer through .data, as quantizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(8, 32))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(hidden, self.codes).argmin(1)
        chosen = nn.functional.one_hot(nearest, 8).to(hidden.dtype)
        if self.training:
            self.codes.data.mul_(0.9).add_(chosen.t() @ hidden.detach(), alpha=0.01)
        return hidden + (chosen @ self.codes - hidden).detach()


class TwoBranches(Net):
    """The biases of its two branches have the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 32)
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(batch) + self.other(batch)) + self.shift


def scale_gradients(state: State, batch: torch.Tensor, number: int) -> float:
    """Changes every gradient in place, by another number."""
    state.optimizer.zero_grad()
    loss = loss_of(state.model(batch), batch)
    loss.backward()
    for place, parameter in enumerate(state.model.parameters()):
        parameter.grad.mul_(1.0 + place)
    state.optimizer.step()
    return loss.item()


def lay_out_gradients(state: State) -> None:
    """One flat memory for all gradients."""
    parameters = list(state.model.parameters())
    state.flat = torch.zeros(sum(each.numel() for each in parameters))
    start = 0
    for each in parameters:
        each.grad = state.flat[start : start + each.numel()].view_as(each)
        start += each.numel()


def flat_step(state: State, batch: torch.Tensor, number: int) -> float:
    state.flat.zero_()
    loss = loss_of(state.model(batch), batch)
    loss.backward()
    state.flat.mul_(0.5)
    state.optimizer.step()
    return loss.item()


def checkpointed(*, reentrant: bool) -> object:
    def loss(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
        batch = batch.clone().requires_grad_(reentrant)  # or nothing would be differentiated
        return loss_of(checkpoint(state.model, batch, use_reentrant=reentrant), batch.detach())

    return loss


def backward_in_thread(state: State, batch: torch.Tensor, number: int) -> float:
    state.optimizer.zero_grad()
    loss = loss_of(state.model(batch), batch)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    state.optimizer.step()
    return loss.item()


def create_graph_step(state: State, batch: torch.Tensor, number: int) -> float:
    """Asks for a graph of the backward pass and does not use it."""
    state.optimizer.zero_grad()
    loss = loss_of(state.model(batch), batch)
    loss.backward(create_graph=True)
    for parameter in state.model.parameters():
        parameter.grad = parameter.grad.detach()
    state.optimizer.step()
    return loss.item()


def gradient_by_hand(state: State, batch: torch.Tensor, number: int) -> float:
    """Starts the backward pass from a gradient that lies transposed."""
    state.optimizer.zero_grad()
    output = state.model(batch)
    output.backward(batch.t()[: output.shape[1]].t())
    state.optimizer.step()
    return output.sum().item()


def freeze_norm(state: State, number: int) -> None:
    state.model.bn.train(number < 10)


def note_strides(state: State, number: int) -> None:
    state.strides = [None if each.grad is None else each.grad.stride() for each in state.model.parameters()]


PATTERNS = [
    Pattern(name="weights clamped in the forward under no_grad", make=ClampsItself),
    Pattern(name="weights clamped in the forward through .data", make=ClampsByData),
    Pattern(
        name="weights assigned to .data in the forward",
        make=AssignsData,
        outcome=LEFT + "puts another tensor into .data",
    ),
    Pattern(name="a momentum encoder moved in the forward", make=Momentum),
    Pattern(name="a code book moved through .data in the forward", make=CodeBook),
    Pattern(name="gradients changed in place, each by another number", make=TwoBranches, step=scale_gradients),
    Pattern(
        name="all gradients in one flat tensor",
        make=TwoBranches,
        start=lay_out_gradients,
        step=flat_step,
        beside=lambda state: state.flat,
    ),
    Pattern(
        name="torch.utils.checkpoint around the fitted model",
        make=Normed,
        step=step_of(checkpointed(reentrant=False)),
    ),
    Pattern(
        name="a reentrant checkpoint around the fitted model", make=Normed, step=step_of(checkpointed(reentrant=True))
    ),
    Pattern(name="the backward pass in a thread", make=Normed, step=backward_in_thread),
    Pattern(name="backward(create_graph=True), not used", make=Net, step=create_graph_step),
    Pattern(name="backward from a transposed gradient", make=Net, step=gradient_by_hand),
    Pattern(name="batch norm frozen from the tenth step on (bn.eval())", make=Normed, change=freeze_norm),
    Pattern(
        name="the layout of gradients in memory",
        make=TwoBranches,
        change=note_strides,
        beside=lambda state: str(state.strides),
    ),
]
