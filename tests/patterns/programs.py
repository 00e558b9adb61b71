"""Models and loops of several fields, as they are written there."""

import dataclasses
import enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from patterns.models import Conv, Net, Normed
from patterns.pattern import LEFT, Pattern, State, fit, fit_with_room, loss_of, step_of


def images(number: int) -> torch.Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(number))


class Autoencoder(nn.Module):
    """A variational one, which returns its losses by name."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 16), nn.Linear(8, 16)
        self.beta = 0.0

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        mean, log_variance = self.encoder(batch).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        rebuilt = self.decoder(code)
        return {
            "loss": F.mse_loss(rebuilt, batch) + self.beta * divergence,
            "divergence": divergence,
            "rebuilt": rebuilt,
        }


class Denoiser(nn.Module):
    """A small U-Net with an embedding of time."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm, self.time = nn.GroupNorm(4, 16), nn.Embedding(100, 16)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(8 + 8, 3, 3, padding=1)
        self.register_buffer("alphas", torch.linspace(0.99, 0.01, 100))

    def forward(self, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        wide = F.silu(self.one(noisy))
        deep = F.silu(self.norm(self.two(wide)) + self.time(time)[:, :, None, None])
        return self.out(torch.cat([self.up(deep), wide], 1))


def denoising(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    time, noise = torch.randint(0, 100, (4,)), torch.randn_like(batch)
    alpha = state.model.alphas[time].view(-1, 1, 1, 1)
    return F.mse_loss(state.model(alpha.sqrt() * batch + (1 - alpha).sqrt() * noise, time), noise)


class Experts(nn.Module):
    """Picks the rows of every expert by index."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(batch).softmax(-1).topk(2, -1)
        result = torch.zeros_like(batch)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            result = result.index_add(0, row, expert(batch[row]) * weights[row, place, None])
        return result


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(states))
        return self.policy(hidden), self.value(hidden).squeeze(-1)

    @torch.no_grad()
    def act(self, states: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Categorical(logits=self(states)[0]).sample()


def policy_gradient(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    actions = state.model.act(batch)
    logits, value = state.model(batch)
    policy = torch.distributions.Categorical(logits=logits)
    gain = batch.sum(-1) - value.detach()
    return F.mse_loss(value, batch.sum(-1)) - (policy.log_prob(actions) * gain).mean() - 0.01 * policy.entropy().mean()


class ReturnsPolicy(ActorCritic):
    def forward(self, states: torch.Tensor) -> Any:
        logits, value = super().forward(states)
        return torch.distributions.Categorical(logits=logits), value


class Detector(nn.Module):
    """Returns losses by name if it is given targets."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.boxes = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, images: torch.Tensor, targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        features = [F.relu(self.body(images))]
        features.append(F.max_pool2d(features[0], 2))
        return {
            "classes": sum(self.classes(each).square().mean() for each in features),
            "boxes": sum(self.boxes(each).abs().mean() * one["w"] for each, one in zip(features, targets, strict=True)),
        }


def targets(number: int) -> list[dict[str, torch.Tensor]]:
    return [{"w": torch.tensor(1.0 + number)}, {"w": torch.tensor(2.0)}]


def detection(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    losses = state.model(batch, targets(number))
    return sum(losses.values()) if number % 3 else losses["boxes"]


class Queue(nn.Module):
    """Compares with a queue of earlier codes, which it shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 8)
        self.register_buffer("queue", F.normalize(torch.randn(64, 8), dim=1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        codes = F.normalize(self.encoder(batch), dim=1)
        logits = torch.cat([codes.square().sum(1, keepdim=True), codes @ self.queue.clone().t()], 1) / 0.2
        with torch.no_grad():
            self.shift(torch.cat([codes.detach(), self.queue[:32]]))
        return F.cross_entropy(logits, torch.zeros(len(batch), dtype=torch.long))

    def shift(self, codes: torch.Tensor) -> None:
        self.queue.copy_(codes)


class QueueByCounter(Queue):
    """Keeps its place in a buffer and asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def shift(self, codes: torch.Tensor) -> None:
        place = int(self.place)
        self.queue[place : place + 32] = codes[:32]
        self.place[0] = (place + 32) % 64


class Distilled(nn.Module):
    """Has a frozen teacher in eval mode inside."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = Normed().requires_grad_(False), Normed()
        self.teacher.eval()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = F.softmax(self.teacher(batch), -1)
        return F.kl_div(F.log_softmax(self.student(batch), -1), wanted, reduction="batchmean")


class Standardised(Conv):
    """Standardises the weights of its convolution."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        weight = self.conv.weight
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / weight.std((1, 2, 3), keepdim=True)
        return self.head(torch.relu(self.bn(F.conv2d(images, weight, self.conv.bias, padding=1))).mean((2, 3)))


class Gumbel(Net):
    temperature = 1.0

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.gumbel_softmax(hidden, tau=self.temperature, hard=True)


class Mode(enum.Enum):
    SOFT = 1
    HARD = 2


@dataclasses.dataclass
class Config:
    rate: float = 0.1
    activation: str = "tanh"
    mode: Mode = Mode.SOFT


class Configured(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = getattr(torch, self.config.activation)(hidden)
        return F.dropout(hidden, self.config.rate) if self.config.mode is Mode.SOFT else hidden.sign() * hidden


def reconfigure(state: State, number: int) -> None:
    state.model.config = dataclasses.replace(
        state.model.config,
        rate=0.1 + number // 8 / 10,
        activation="tanh" if number < 10 else "sigmoid",
        mode=Mode.SOFT if number % 4 else Mode.HARD,
    )


class Losses(Net):
    """Returns three losses."""

    def forward(self, batch: torch.Tensor) -> list[torch.Tensor]:
        hidden = torch.tanh(self.first(batch))
        scores = self.second(torch.sigmoid(hidden))
        return [F.mse_loss(scores, batch[:, :4]), hidden.abs().mean(), scores.std()]


def balance(state: State) -> None:
    state.weights = nn.Parameter(torch.zeros(3))
    state.optimizer.add_param_group({"params": [state.weights]})


def balanced(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return sum(loss * weight.exp() - weight for loss, weight in zip(state.model(batch), state.weights, strict=True))


def projected(state: State, batch: torch.Tensor, number: int) -> float:
    """Adds the gradients of two losses by hand."""
    parameters = list(state.model.parameters())
    state.optimizer.zero_grad()
    losses = state.model(batch)[:2]
    found = [
        torch.autograd.grad(each, parameters, retain_graph=each is losses[0], allow_unused=True) for each in losses
    ]
    for parameter, *gradients in zip(parameters, *found, strict=True):
        parameter.grad = sum((each for each in gradients if each is not None), torch.zeros_like(parameter))
    state.optimizer.step()
    return losses[0].item()


class Raises(Net):
    is_bad = False

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_bad:
            raise ValueError("a bad batch")
        return torch.sigmoid(hidden)


def skip_bad_ones(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    state.model.is_bad = number % 6 == 5
    try:
        return loss_of(state.model(batch), batch)
    except ValueError:
        return sum(0 * each.sum() for each in state.model.parameters())


PATTERNS = [
    Pattern(
        name="a variational autoencoder, its losses by name, the weight of one annealed",
        make=Autoencoder,
        change=lambda state, number: setattr(state.model, "beta", min(1.0, number / 10)),
        step=step_of(lambda state, batch, number: state.model(batch)["loss"]),
    ),
    Pattern(
        name="diffusion: a U-Net, time and noise drawn in the loop",
        make=Denoiser,
        batch=images,
        fit=lambda state, sample: [fit(state.model, (sample, torch.zeros(4, dtype=torch.long))), None][1],
        step=step_of(denoising),
    ),
    Pattern(
        name="mixture of experts that picks rows by index",
        make=Experts,
        fit=fit_with_room,
        slow=True,
        step=step_of(lambda state, batch, number: F.mse_loss(state.model(batch), batch)),
    ),
    Pattern(name="actor and critic, acting in training mode", make=ActorCritic, step=step_of(policy_gradient)),
    Pattern(
        name="a model that returns a distribution",
        make=ReturnsPolicy,
        step=step_of(lambda state, batch, number: state.model(batch)[0].entropy().mean()),
        outcome=LEFT + "torch.distributions looks at the values of its arguments",
    ),
    Pattern(
        name="a detector that returns losses by name, sometimes one of them used",
        make=Detector,
        batch=images,
        fit=lambda state, sample: [fit(state.model, (sample, targets(0))), None][1],
        step=step_of(detection),
    ),
    Pattern(
        name="a queue of codes shifted by the forward",
        make=Queue,
        step=step_of(lambda state, batch, number: state.model(batch)),
    ),
    Pattern(
        name="a queue of codes with its place in a buffer",
        make=QueueByCounter,
        step=step_of(lambda state, batch, number: state.model(batch)),
        outcome=LEFT + "asks for the value of a tensor",
    ),
    Pattern(
        name="distillation from a frozen teacher inside",
        make=Distilled,
        step=step_of(lambda state, batch, number: state.model(batch)),
    ),
    Pattern(
        name="standardised weights of a convolution",
        make=Standardised,
        batch=images,
        step=step_of(lambda state, batch, number: state.model(batch).square().mean()),
    ),
    Pattern(
        name="Gumbel softmax, its temperature annealed",
        make=Gumbel,
        change=lambda state, number: setattr(state.model, "temperature", max(0.3, 1 - number / 15)),
        slow=True,
    ),
    Pattern(
        name="a config with an enum, replaced before every step",
        make=Configured,
        change=reconfigure,
        fit=fit_with_room,
        slow=True,
    ),
    Pattern(
        name="weights of three losses that are learned outside",
        make=Losses,
        start=balance,
        step=step_of(balanced),
        beside=lambda state: state.weights,
    ),
    Pattern(name="gradients of two losses added by hand", make=Losses, step=projected),
    Pattern(name="a forward that raises now and then, caught by the loop", make=Raises, step=step_of(skip_bad_ones)),
]
