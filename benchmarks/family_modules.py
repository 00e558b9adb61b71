"""Small models of the families that plain torch users write themselves."""

import torch
import torch.nn.functional as F
from torch import nn


class Recurrent(nn.Module):
    """Words to the next words through a recurrent layer."""

    def __init__(self, layer: nn.Module, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layer = layer
        self.head = nn.Linear(width, words)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.layer(self.embedding(given))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), given.flatten())


class SequenceToSequence(nn.Module):
    """`nn.Transformer` between an embedding and a head."""

    def __init__(self, inner: nn.Transformer, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.inner = inner
        self.head = nn.Linear(width, words)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        made = self.inner(self.embedding(source), self.embedding(target))
        return F.cross_entropy(self.head(made).flatten(0, 1), target.flatten())


def _double(given: int, made: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(given, made, 3, padding=1), nn.InstanceNorm3d(made), nn.LeakyReLU(0.1),
        nn.Conv3d(made, made, 3, padding=1), nn.InstanceNorm3d(made), nn.LeakyReLU(0.1),
    )  # fmt: skip


class UNet3d(nn.Module):
    """Down twice, up twice, over volumes."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.first, self.second, self.third = _double(given, 8), _double(8, 16), _double(16, 32)
        self.up_second, self.up_first = nn.ConvTranspose3d(32, 16, 2, 2), nn.ConvTranspose3d(16, 8, 2, 2)
        self.back_second, self.back_first = _double(32, 16), _double(16, 8)
        self.head = nn.Conv3d(8, made, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(F.max_pool3d(first, 2))
        third = self.third(F.max_pool3d(second, 2))
        second = self.back_second(torch.cat([second, self.up_second(third)], 1))
        made: torch.Tensor = self.head(self.back_first(torch.cat([first, self.up_first(second)], 1)))
        return made


class GraphNetwork(nn.Module):
    """Messages along edges, added up at their ends."""

    def __init__(self, given: int, width: int, rounds: int) -> None:
        super().__init__()
        self.start = nn.Linear(given, width)
        self.messages = nn.ModuleList(nn.Sequential(nn.Linear(2 * width, width), nn.ReLU()) for _ in range(rounds))
        self.updates = nn.ModuleList(nn.GRUCell(width, width) for _ in range(rounds))

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        hidden = self.start(nodes)
        source, target = edges
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat([hidden[source], hidden[target]], -1))
            received = torch.zeros_like(hidden).index_add(0, target, sent)
            hidden = update(received, hidden)
        made: torch.Tensor = hidden.square().mean()
        return made


class GanStep(nn.Module):
    """The losses of both players in one step, each differentiated for its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(16, 256), nn.Unflatten(1, (16, 4, 4)), nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.BatchNorm2d(16),
            nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.critic = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
            nn.Linear(512, 1),
        )  # fmt: skip

    def forward(self, noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        made = self.generator(noise)
        told = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(made.detach())).mean()
        weights = dict(self.critic.named_parameters())
        frozen = {name: weight.detach() for name, weight in weights.items()}
        fooled = F.softplus(-torch.func.functional_call(self.critic, frozen, (made,))).mean()
        loss: torch.Tensor = told + fooled
        return loss


class DiffusionStep(nn.Module):
    """A UNet with a time embedding that predicts the noise in a picture."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.given = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, width, 3, 2, 1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(3))
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.made = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, picture: torch.Tensor, noise: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
        share = moment[:, None, None, None]
        noisy = (1 - share).sqrt() * picture + share.sqrt() * noise
        waves = moment[:, None] * torch.arange(1, 9, dtype=moment.dtype)
        told = self.time(torch.cat([waves.sin(), waves.cos()], 1))[:, :, None, None]
        top = F.silu(self.norms[0](self.given(noisy) + told))
        low = F.silu(self.norms[1](self.down(top) + told))
        tokens = low.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        low = F.silu(self.norms[2](self.middle(tokens.transpose(1, 2).unflatten(2, low.shape[2:])) + told))
        up = F.interpolate(low, scale_factor=2.0)
        return F.mse_loss(self.made(torch.cat([top, up], 1)), noise)
