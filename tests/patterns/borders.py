"""What is used on both sides of a border: of a part, or of a call."""

import torch
from torch import nn

from patterns.models import Blocks, Net, words
from patterns.pattern import LEFT, Pattern, State, fit, fit_with_room, step_of


class Looks(Blocks):
    """Looks at values, so that it is planned by its parts."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(batch)
        if hidden.mean() > 1e9:
            raise ValueError("too large")
        return self.around(hidden)

    def around(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Residual(nn.Module):
    """Uses what it is given three times."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.change = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.sigmoid(self.gate(hidden)) * torch.tanh(self.change(hidden))


class Skips(Looks):
    """Adds what all blocks are given to the result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def around(self, hidden: torch.Tensor) -> torch.Tensor:
        kept = []
        for block in self.blocks:
            kept.append(hidden)
            hidden = block(hidden)
        return hidden + sum(each.sin() for each in kept)


class EarlySkips(Skips):
    """Uses what blocks are given before they are called."""

    def around(self, hidden: torch.Tensor) -> torch.Tensor:
        total = hidden.sin()
        for block in self.blocks:
            total = total + hidden.sin()
            hidden = block(hidden)
        return total + hidden


class Twice(nn.Module):
    """Uses a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(hidden))))


class SharedWeights(Looks):
    """Calls a block again that uses its weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Twice()] * 3)


LOOKS = "is used several times inside and later outside"


class Tied(Net):
    """Uses one layer twice in every call."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.second(hidden))))

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(32, 32)


class Recurrent(nn.Module):
    """A recurrent layer, which uses its weights once for every step in time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, batch: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, state = self.layer(batch.view(len(batch), 4, 4), state)
        return self.head(hidden), state


class Translates(nn.Module):
    """One table of words under four names, as T5 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.encoder, self.decoder = (nn.Embedding(40, 16) for _ in range(3))
        self.layer, self.scores = nn.Linear(16, 16), nn.Linear(16, 40, bias=False)
        self.encoder.weight = self.decoder.weight = self.scores.weight = self.shared.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        read = torch.tanh(self.layer(self.encoder(words))).mean(1, keepdim=True)
        return self.scores(torch.tanh(self.layer(self.decoder(words.flip(1)) + read)))


def chunk_by_chunk(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    first, hidden = state.model(batch)
    second, _ = state.model(batch.cos(), hidden)
    return first.square().mean() + second.sin().mean()


def with_penalty(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    loss = state.model(batch).square().mean()
    return loss + 0.1 * sum((each.sin() * each).sum() for each in state.model.parameters())


def behind_a_stem(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    hidden = torch.tanh(state.stem(batch))
    return (state.model(hidden) * hidden).square().mean()


def compared(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return (state.model(batch) - state.model(batch.sin())).square().mean()


PATTERNS = [
    Pattern(
        name="a model that uses a layer twice", make=Tied, step=step_of(lambda s, b, n: s.model(b).square().mean())
    ),
    Pattern(
        name="two calls in one backward pass of a model that uses a layer twice",
        make=Tied,
        step=step_of(compared),
    ),
    Pattern(
        name="two calls of a GRU in one backward pass, the state handed on",
        make=Recurrent,
        fit=fit_with_room,
        step=step_of(chunk_by_chunk),
    ),
    Pattern(
        name="a penalty on all weights in the loop, of a model that uses a layer twice",
        make=Tied,
        step=step_of(with_penalty),
    ),
    Pattern(
        name="a table of words under four names (T5), and a penalty on all weights in the loop",
        make=Translates,
        batch=words,
        step=step_of(with_penalty),
    ),
    Pattern(
        name="the head of a network fitted, its input used once more behind it",
        make=Residual,
        fit=lambda state, batch: fit(state.model, torch.zeros(32, 16, requires_grad=True)),
        step=step_of(behind_a_stem),
        before_fit=lambda state: setattr(state, "stem", nn.Linear(16, 16)),
        beside=lambda state: state.stem,
    ),
    Pattern(
        name="parts with residuals inside, whose inputs are added to the result of the model",
        make=Skips,
        fit=fit_with_room,
        outcome=LEFT + LOOKS,
    ),
    Pattern(name="parts with residuals inside, and skips before them", make=EarlySkips, fit=fit_with_room),
    Pattern(
        name="a part that uses its weights twice, called three times",
        make=SharedWeights,
        fit=fit_with_room,
        outcome=LEFT + LOOKS,
    ),
    Pattern(name="parts in a chain", make=Looks, fit=fit_with_room),
]
