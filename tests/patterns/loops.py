"""Training loops: several models, several calls a step, and what happens between the steps."""

import copy
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from patterns.models import Conv, Net, Normed, Words, loss_of_words, words
from patterns.pattern import STEPS, Pattern, State, features, fit, fit_with_room, loss_of, usual_step


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(32, 4)

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.first(batch))
        return self.second(hidden), self.other(hidden)


class ByArguments(Net):
    def forward(self, batch: torch.Tensor, scale: float = 1.0, *, mode: str = "tanh", mask: Any = None) -> torch.Tensor:
        hidden = getattr(torch, mode)(self.first(batch)) * scale
        return self.second(hidden if mask is None else hidden * mask)


class Discriminator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 32), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(32, 1))


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


def with_arguments(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    mask = batch.new_ones(32, 32).tril() if number % 3 else None
    return loss_of(state.model(batch, 1.0 + number % 2, mode="tanh" if number < 10 else "sin", mask=mask), batch)


def of_words(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return loss_of_words(state.model(batch), batch)


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


def start_loading(state: State) -> None:
    data = TensorDataset(torch.cat([features(number) for number in range(STEPS)]))
    state.batches = iter(DataLoader(data, batch_size=32, shuffle=True, num_workers=2))


def loaded_step(state: State, batch: torch.Tensor, number: int) -> float:
    return usual_step(state, next(state.batches)[0], number)


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


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def images(number: int) -> torch.Tensor:
    return torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(number))


def image_loss(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return state.model(batch).square().mean()


def channels_last(state: State, number: int) -> None:
    if number == 10:
        state.model.to(memory_format=torch.channels_last)


def short_last(number: int) -> torch.Tensor:
    return features(number)[: 32 if number < STEPS - 1 else 20]


def other_lengths(number: int) -> torch.Tensor:
    return words(number, 12 - number % 3)


def use_deterministic(state: State, number: int) -> None:
    torch.use_deterministic_algorithms(number >= 10)


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
    Pattern(name="a DataLoader with two workers", make=Net, start=start_loading, step=loaded_step, slow=True),
    Pattern(name="evaluation in between (batch norm)", make=Normed, change=evaluate, beside=lambda state: state.scores),
    Pattern(name="parameters frozen and unfrozen in turn", make=Net, change=freeze_in_turn),
    Pattern(name="the model made double in between", make=Net, change=to_double, step=double_step, fit=fit_with_room),
    Pattern(name="the state dict saved, loaded and assigned in between", make=Normed, change=save_and_load),
    Pattern(name="training goes on with a deepcopy", make=Normed, change=go_on_with_copy),
    Pattern(name="parameters assigned anew in between", make=Net, change=reassign),
    Pattern(
        name="channels_last from the tenth step on",
        make=Conv,
        batch=images,
        step=step_of(image_loss),
        change=channels_last,
        fit=fit_with_room,
    ),
    Pattern(
        name="deterministic algorithms from the tenth step on",
        make=lambda: Words(),
        batch=words,
        step=step_of(of_words),
        change=use_deterministic,
        end=lambda state: torch.use_deterministic_algorithms(False),
    ),
    Pattern(
        name="keywords and constants that change from call to call",
        make=ByArguments,
        step=step_of(with_arguments),
        fit=fit_with_room,
    ),
    Pattern(name="a smaller last batch", make=Normed, batch=short_last),
    Pattern(name="sentences of other lengths", make=Words, batch=other_lengths, step=step_of(of_words)),
    Pattern(name="tied weights", make=lambda: Words(tied=True), batch=words, step=step_of(of_words)),
    Pattern(name="an embedding with padding", make=lambda: Words(padding=0), batch=words, step=step_of(of_words)),
    Pattern(
        name="an embedding with sparse gradients",
        make=lambda: Words(sparse=True),
        batch=words,
        step=step_of(of_words),
        optimizer=plain_sgd,
    ),
    Pattern(name="in-place operations on the output", make=Net, step=step_of(changed_output)),
]
