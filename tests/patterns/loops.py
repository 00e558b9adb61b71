"""Training loops: several models, several calls a step, and what happens between the steps."""

import copy
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from patterns.models import Net, Normed
from patterns.pattern import STEPS, Pattern, State, features, fit, fit_with_room, loss_of, step_of, usual_step


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(32, 4)

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.first(batch))
        return self.second(hidden), self.other(hidden)


class Discriminator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 32), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(32, 1))


def plain_loss(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return loss_of(state.model(batch), batch)


def one_head(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return loss_of(state.model(batch)[0], batch)


def head_in_turn(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return loss_of(state.model(batch)[number % 2], batch)


def siamese(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return nn.functional.cosine_similarity(state.model(batch), state.model(batch + 0.1)).mean()


def triplet(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    anchor, near, far = (state.model(batch + shift) for shift in (0.0, 0.1, 2.0))
    return nn.functional.triplet_margin_loss(anchor, near, far)


def by_functional_call(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    halved = {name: each * 0.5 for name, each in state.model.named_parameters()}
    return loss_of(functional_call(state.model, halved, (batch,)), batch)


def in_autocast(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(state.model(batch), batch)


def fit_in_autocast(state: State, sample: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        fit(state.model, sample)


def in_thread(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    outputs: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(state.model(batch)))
    thread.start()
    thread.join()
    return loss_of(outputs[0], batch)


def changed_output(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    output = state.model(batch)
    output.mul_(2).add_(1)
    return loss_of(output, batch)


def of_encoder_too(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return loss_of(state.model(batch), batch) + state.model.first(batch).square().mean()


def scaled_step(state: State, batch: torch.Tensor, number: int) -> float:
    state.optimizer.zero_grad()
    loss = in_autocast(state, batch, number)
    state.scaler.scale(loss).backward()
    state.scaler.unscale_(state.optimizer)
    nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    return loss.item()


def accumulating_step(state: State, batch: torch.Tensor, number: int) -> float:
    loss = loss_of(state.model(batch), batch) / 4
    loss.backward()
    if number % 4 == 3:
        state.optimizer.step()
        state.optimizer.zero_grad()
    return loss.item()


def lbfgs_step(state: State, batch: torch.Tensor, number: int) -> float:
    def closure() -> torch.Tensor:
        state.optimizer.zero_grad()
        loss = loss_of(state.model(batch), batch)
        loss.backward()
        return loss

    return state.optimizer.step(closure).item()


def sam_step(state: State, batch: torch.Tensor, number: int) -> float:
    """Sharpness-aware: the gradient of the weights a small way uphill."""
    parameters = list(state.model.parameters())
    state.optimizer.zero_grad()
    loss_of(state.model(batch), batch).backward()
    with torch.no_grad():
        ways = [0.05 * each.grad for each in parameters]
        torch._foreach_add_(parameters, ways)
    state.optimizer.zero_grad()
    loss = loss_of(state.model(batch), batch)
    loss.backward()
    with torch.no_grad():
        torch._foreach_sub_(parameters, ways)
    state.optimizer.step()
    return loss.item()


def gan_step(state: State, batch: torch.Tensor, number: int) -> float:
    critic, real = state.critic, batch[:, :4]
    state.critic_optimizer.zero_grad()
    fake = state.model(batch)
    apart = nn.functional.softplus(-critic(real)).mean() + nn.functional.softplus(critic(fake.detach())).mean()
    apart.backward()
    state.critic_optimizer.step()
    state.optimizer.zero_grad()
    loss = nn.functional.softplus(-critic(fake)).mean()
    loss.backward()
    state.optimizer.step()
    return loss.item()


def make_critic(state: State) -> None:
    state.critic = Discriminator()
    state.critic_optimizer = torch.optim.Adam(state.critic.parameters())


def fit_both(state: State, sample: torch.Tensor) -> None:
    fit(state.model, sample)
    fit(state.critic, sample[:, :4])


def evaluate(state: State, number: int) -> None:
    if number % 5 == 4:
        state.model.eval()
        with torch.no_grad():
            state.scores = [*getattr(state, "scores", []), state.model(features(100))]
        state.model.train()


def freeze_in_turn(state: State, number: int) -> None:
    state.model.first.requires_grad_(number // 5 % 2 == 1)


def to_double(state: State, number: int) -> None:
    if number == 10:
        state.model.double()
        state.optimizer = torch.optim.AdamW(state.model.parameters(), lr=0.01)


def double_step(state: State, batch: torch.Tensor, number: int) -> float:
    return usual_step(state, batch.to(state.model.first.weight.dtype), number)


def save_and_load(state: State, number: int) -> None:
    if number == 5:
        state.saved = copy.deepcopy((state.model.state_dict(), state.optimizer.state_dict()))
    if number == 10:
        state.model.load_state_dict(state.saved[0], assign=True)
        state.optimizer = torch.optim.AdamW(state.model.parameters(), lr=0.01, weight_decay=0.1)
        state.optimizer.load_state_dict(state.saved[1])


def go_on_with_copy(state: State, number: int) -> None:
    if number == 10:
        state.model = copy.deepcopy(state.model)
        state.optimizer = torch.optim.AdamW(state.model.parameters(), lr=0.01)


def reassign(state: State, number: int) -> None:
    if number == 10:
        state.model.second.weight = nn.Parameter(torch.randn(4, 32))
        state.model.first.bias.data = torch.randn(32)
        state.optimizer = torch.optim.AdamW(state.model.parameters(), lr=0.01)


def average(kind: str) -> Any:
    def start(state: State) -> None:
        state.average = AveragedModel(state.model, multi_avg_fn=get_ema_multi_avg_fn() if kind == "ema" else None)

    return start


def update_average(state: State, batch: torch.Tensor, number: int) -> float:
    loss = usual_step(state, batch, number)
    state.average.update_parameters(state.model)
    return loss


def schedule(state: State) -> None:
    state.schedule = torch.optim.lr_scheduler.OneCycleLR(state.optimizer, max_lr=0.1, total_steps=STEPS)


def scheduled_step(state: State, batch: torch.Tensor, number: int) -> float:
    loss = usual_step(state, batch, number)
    state.schedule.step()
    return loss


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def skip_step(state: State, batch: torch.Tensor, number: int) -> float:
    """Every third batch is left out after its forward pass."""
    loss = loss_of(state.model(batch), batch)
    if number % 3:
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
    return loss.item()


PATTERNS = [
    Pattern(name="two heads, the loss on one (AdamW with weight decay)", make=TwoHeads, step=step_of(one_head)),
    Pattern(name="two heads, the loss on one of them in turn", make=TwoHeads, step=step_of(head_in_turn)),
    Pattern(
        name="GAN, the generator fitted",
        make=Net,
        before_fit=make_critic,
        step=gan_step,
        beside=lambda state: state.critic,
    ),
    Pattern(
        name="GAN, both models fitted",
        make=Net,
        before_fit=make_critic,
        fit=fit_both,
        step=gan_step,
        beside=lambda state: state.critic,
        slow=True,
    ),
    Pattern(name="siamese: two calls in one step", make=Normed, step=step_of(siamese)),
    Pattern(name="triplet loss: three calls in one step", make=Normed, step=step_of(triplet)),
    Pattern(name="torch.func.functional_call with other weights", make=Net, step=step_of(by_functional_call)),
    Pattern(name="a part of the model called by itself beside the model", make=Net, step=step_of(of_encoder_too)),
    Pattern(name="autocast to bfloat16", make=Net, fit=fit_in_autocast, step=step_of(in_autocast)),
    Pattern(
        name="GradScaler with autocast and clipping",
        make=Net,
        fit=fit_in_autocast,
        start=lambda state: setattr(state, "scaler", torch.amp.GradScaler("cpu", enabled=True)),
        step=scaled_step,
        beside=lambda state: state.scaler.state_dict(),
    ),
    Pattern(name="gradient accumulation over four batches", make=Normed, step=accumulating_step),
    Pattern(name="gradient clipping by norm", make=Net, step=step_of(plain_loss, clip=True)),
    Pattern(name="zero_grad(set_to_none=False)", make=TwoHeads, step=step_of(one_head, set_to_none=False)),
    Pattern(name="every third batch left out after its forward", make=Normed, step=skip_step),
    Pattern(
        name="LBFGS with a closure",
        make=Net,
        optimizer=lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=3),
        step=lbfgs_step,
    ),
    Pattern(name="SAM: two passes a step on moved weights", make=Normed, step=sam_step, optimizer=sgd),
    Pattern(
        name="an exponential average of the weights",
        make=Normed,
        start=average("ema"),
        step=update_average,
        beside=lambda state: state.average,
    ),
    Pattern(name="SWA", make=Normed, start=average("swa"), step=update_average, beside=lambda state: state.average),
    Pattern(name="a learning-rate schedule", make=Net, optimizer=sgd, start=schedule, step=scheduled_step),
    Pattern(name="the forward in a thread", make=Normed, step=step_of(in_thread)),
    Pattern(name="evaluation in between (batch norm)", make=Normed, change=evaluate, beside=lambda state: state.scores),
    Pattern(name="parameters frozen and unfrozen in turn", make=Net, change=freeze_in_turn),
    Pattern(name="the model made double in between", make=Net, change=to_double, step=double_step, fit=fit_with_room),
    Pattern(name="the state dict saved, loaded and assigned in between", make=Normed, change=save_and_load),
    Pattern(name="training goes on with a deepcopy", make=Normed, change=go_on_with_copy),
    Pattern(name="parameters assigned anew in between", make=Net, change=reassign),
    Pattern(name="in-place operations on the output", make=Net, step=step_of(changed_output)),
]
