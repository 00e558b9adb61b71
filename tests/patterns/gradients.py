"""Use gradients, and values between the forward and the backward pass, as people do."""

from typing import Any

import torch
from torch.func import functional_call, grad, jvp, vmap

from patterns.forwards import UpdatesBuffer
from patterns.loops import TwoHeads
from patterns.models import Net, Normed
from patterns.pattern import Pattern, State, features, fit_with_room, loss_of, plain_sgd, step_of


def fgsm_step(state: State, batch: torch.Tensor, number: int) -> float:
    """A step on a batch that was moved along the sign of its gradient."""
    batch = batch.clone().requires_grad_()
    loss_of(state.model(batch), batch.detach()).backward()
    moved = (batch + 0.1 * batch.grad.sign()).detach()
    state.moved = moved
    state.optimizer.zero_grad()
    loss = loss_of(state.model(moved), batch.detach())
    loss.backward()
    state.optimizer.step()
    return loss.item()


def gradient_penalty(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    batch = batch.clone().requires_grad_()
    output = state.model(batch)
    (slope,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
    return loss_of(output, batch.detach()) + slope.square().mean()


def backward_twice(state: State, batch: torch.Tensor, number: int) -> float:
    state.optimizer.zero_grad()
    loss = loss_of(state.model(batch), batch)
    loss.backward(retain_graph=True)
    loss.backward()
    state.optimizer.step()
    return loss.item()


def one_head_after_the_other(state: State, batch: torch.Tensor, number: int) -> float:
    state.optimizer.zero_grad()
    one, other = (loss_of(output, batch) for output in state.model(batch))
    one.backward(retain_graph=True)
    (2 * other).backward()
    state.optimizer.step()
    return one.item()


def autograd_grad_step(state: State, batch: torch.Tensor, number: int) -> float:
    loss = loss_of(state.model(batch), batch)
    parameters = list(state.model.parameters())
    with torch.no_grad():
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter -= 0.1 * gradient
    return loss.item()


def some_inputs_step(state: State, batch: torch.Tensor, number: int) -> float:
    state.optimizer.zero_grad()
    loss = loss_of(state.model(batch), batch)
    loss.backward(inputs=list(state.model.second.parameters()))
    state.optimizer.step()
    return loss.item()


def functional_loss(state: State, batch: torch.Tensor) -> Any:
    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(functional_call(state.model, parameters, (batch,)), batch)

    return loss


def func_grad_step(state: State, batch: torch.Tensor, number: int) -> float:
    parameters = {name: each.detach() for name, each in state.model.named_parameters()}
    gradients = grad(functional_loss(state, batch))(parameters)
    for name, parameter in state.model.named_parameters():
        parameter.grad = gradients[name]
    state.optimizer.step()
    return gradients["first.weight"].sum().item()


def vmap_step(state: State, batch: torch.Tensor, number: int) -> float:
    """Gradients sample by sample, then their mean."""
    parameters = {name: each.detach() for name, each in state.model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return loss_of(functional_call(state.model, parameters, (sample[None],)), sample[None])

    gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, batch)
    for name, parameter in state.model.named_parameters():
        parameter.grad = gradients[name].mean(0)
    state.optimizer.step()
    return gradients["first.weight"].sum().item()


def forward_mode_step(state: State, batch: torch.Tensor, number: int) -> float:
    """A step along a random direction, by its directional derivative."""
    parameters = {name: each.detach() for name, each in state.model.named_parameters()}
    direction = {name: torch.randn_like(each) for name, each in parameters.items()}
    loss, slope = jvp(functional_loss(state, batch), (parameters,), (direction,))
    for name, parameter in state.model.named_parameters():
        parameter.grad = slope * direction[name]
    state.optimizer.step()
    return loss.item()


def maml_loss(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    """The loss after one inner step, differentiated through that step."""
    parameters = dict(state.model.named_parameters())
    loss = functional_loss(state, batch)
    slopes = torch.autograd.grad(loss(parameters), list(parameters.values()), create_graph=True)
    moved = {name: each - 0.1 * slope for (name, each), slope in zip(parameters.items(), slopes, strict=True)}
    return functional_loss(state, features(number + 100))(moved)


class Scaling(Net):
    """Begins with something that keeps nothing for the backward pass."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch * 2)


def reuse_the_batch(state: State, batch: torch.Tensor, number: int) -> float:
    """Fills the memory of the batch with the next one before the backward pass."""
    state.optimizer.zero_grad()
    batch = batch.clone()
    loss = loss_of(state.model(batch), batch.clone())
    batch.copy_(features(number + 1))
    loss.backward()
    state.optimizer.step()
    return loss.item()


def move_a_bias(state: State, batch: torch.Tensor, number: int) -> float:
    """Changes a parameter that eager's backward pass does not need, before that pass."""
    state.optimizer.zero_grad()
    loss = loss_of(state.model(batch), batch)
    with torch.no_grad():
        state.model.first.bias.mul_(0.9)
    loss.backward()
    state.optimizer.step()
    return loss.item()


def move_by_data(state: State, batch: torch.Tensor, number: int) -> float:
    """Changes a weight behind autograd's back before the backward pass."""
    state.optimizer.zero_grad()
    loss = loss_of(state.model(batch), batch)
    state.model.second.weight.data.mul_(0.9)
    loss.backward()
    state.optimizer.step()
    return loss.item()


def move_a_bias_by_data(state: State, batch: torch.Tensor, number: int) -> float:
    state.optimizer.zero_grad()
    loss = loss_of(state.model(batch), batch)
    state.model.first.bias.data.mul_(0.9)
    loss.backward()
    state.optimizer.step()
    return loss.item()


def late_backward_step(state: State, batch: torch.Tensor, number: int) -> float:
    """Two calls, then the backward pass of the first: buffers have moved in between."""
    state.optimizer.zero_grad()
    first = loss_of(state.model(batch), batch)
    second = loss_of(state.model(batch + 1), batch)
    first.backward()
    second.backward()
    state.optimizer.step()
    return first.item()


def draw_between_step(state: State, batch: torch.Tensor, number: int) -> float:
    state.optimizer.zero_grad()
    loss = loss_of(state.model(batch), batch)
    torch.rand(number)
    loss.backward()
    state.optimizer.step()
    return loss.item() + torch.rand(()).item()


def saved_tensors_step(state: State, batch: torch.Tensor, number: int) -> float:
    """Rounds what is saved for the backward pass to bfloat16."""
    state.optimizer.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each.bfloat16(), lambda each: each.float()):
        loss = loss_of(state.model(batch), batch)
    loss.backward()
    state.optimizer.step()
    return loss.item()


def saved_on_cpu_step(state: State, batch: torch.Tensor, number: int) -> float:
    state.optimizer.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(state.model(batch), batch)
    loss.backward()
    state.optimizer.step()
    return loss.item()


def anomaly_step(state: State, batch: torch.Tensor, number: int) -> float:
    with torch.autograd.set_detect_anomaly(True):
        state.optimizer.zero_grad()
        loss = loss_of(state.model(batch), batch)
        loss.backward()
        state.optimizer.step()
    return loss.item()


class ReturnsItsInput(Net):
    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return super().forward(batch * 2), batch, self.second.weight


def of_returned_parts(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    batch = batch.clone()
    output, same, weight = state.model(batch)
    return (
        loss_of(output, same) + 0.1 * weight.square().mean() + (same is batch) + (weight is state.model.second.weight)
    )


class WritesItsInput(Net):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch += 1
        return super().forward(batch * 2)


def of_written_batch(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    batch = batch.clone()
    return loss_of(state.model(batch), batch)


PATTERNS = [
    Pattern(
        name="adversarial training (FGSM): the input requires a gradient",
        make=Net,
        step=fgsm_step,
        fit=fit_with_room,
        beside=lambda state: state.moved,
    ),
    Pattern(
        name="double backward: a gradient penalty",
        make=Net,
        step=step_of(gradient_penalty),
        fit=fit_with_room,
        outcome="gradients are to be differentiated again",
    ),
    Pattern(
        name="MAML: through an inner step, by functional_call",
        make=Net,
        step=step_of(maml_loss),
        outcome="gradients are to be differentiated again",
    ),
    Pattern(name="backward twice with retain_graph", make=Normed, step=backward_twice),
    Pattern(
        name="the losses of two heads one after the other with retain_graph",
        make=TwoHeads,
        step=one_head_after_the_other,
    ),
    Pattern(name="a loss of one number, expanded", make=Net, step=step_of(lambda s, b, n: s.model(b).sum() * 0.3)),
    Pattern(
        name="a loss of the permuted output",
        make=Net,
        step=step_of(lambda s, b, n: s.model(b).view(8, 4, 4).permute(2, 0, 1).square().mean()),
    ),
    Pattern(name="torch.autograd.grad instead of backward", make=Net, step=autograd_grad_step),
    Pattern(name="backward(inputs=...) for some parameters", make=Net, step=some_inputs_step),
    Pattern(
        name="torch.func.grad",
        make=Net,
        step=func_grad_step,
    ),
    Pattern(
        name="torch.func.vmap: gradients sample by sample",
        make=Net,
        step=vmap_step,
    ),
    Pattern(
        name="torch.func.jvp: forward-mode derivatives",
        make=Net,
        step=forward_mode_step,
        slow=True,
    ),
    Pattern(
        name="the batch overwritten between forward and backward",
        make=Scaling,
        step=reuse_the_batch,
        outcome="was written into between forward and backward",
    ),
    Pattern(
        name="a bias changed between forward and backward",
        make=Net,
        step=move_a_bias,
        outcome="was written into between forward and backward",
    ),
    Pattern(
        name="a bias changed through .data between forward and backward",
        make=Net,
        step=move_a_bias_by_data,
        outcome="first.bias was written into between forward and backward",
    ),
    Pattern(name="a weight changed through .data between forward and backward", make=Net, step=move_by_data),
    Pattern(
        name="two calls with dropout and batch norm, then both backward passes", make=Normed, step=late_backward_step
    ),
    Pattern(
        name="two calls that move a buffer, then both backward passes", make=UpdatesBuffer, step=late_backward_step
    ),
    Pattern(name="the loop draws between forward and backward", make=Normed, step=draw_between_step),
    Pattern(
        name="saved_tensors_hooks that round what is saved",
        make=Net,
        step=saved_tensors_step,
    ),
    Pattern(name="save_on_cpu around the forward", make=Normed, step=saved_on_cpu_step),
    Pattern(name="set_detect_anomaly", make=Normed, step=anomaly_step),
    Pattern(
        name="outputs that are the input and a parameter",
        make=ReturnsItsInput,
        step=step_of(of_returned_parts),
    ),
    Pattern(
        name="a forward that changes its input in place",
        make=WritesItsInput,
        step=step_of(of_written_batch),
    ),
    Pattern(name="nothing special: SGD on two layers", make=Net, optimizer=plain_sgd),
]
