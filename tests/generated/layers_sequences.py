"""Recurrent layers, scans, and what turns sequences into other streams."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from generated.layer import Layer, Stream, layer

RECURRENT = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
CELLS = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell, "RNN": nn.RNNCell}


@layer("recurrent")
class Recurrent(Layer):
    takes = ("sequence",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {
            "kind": rng.choice(sorted(RECURRENT)),
            "width": rng.choice((4, 8)),
            "layers": rng.choice((1, 1, 2)),
            "both_ways": rng.random() < 0.3,
            "dropout": rng.choice((0.0, 0.2)),
            "bias": rng.random() < 0.8,
            "batch_first": rng.random() < 0.7,
            "packed": rng.random() < 0.2,
            "starts": rng.random() < 0.3,
        }

    def __init__(
        self,
        stream: Stream,
        kind: str,
        width: int,
        layers: int,
        both_ways: bool,
        dropout: float,
        bias: bool,
        batch_first: bool,
        packed: bool,
        starts: bool,
    ) -> None:
        super().__init__(stream)
        self.batch_first, self.packed = batch_first, packed
        self.inner = RECURRENT[kind](
            stream.channels,
            width,
            layers,
            bias=bias,
            batch_first=batch_first,
            dropout=dropout if layers > 1 else 0.0,
            bidirectional=both_ways,
        )
        self.start = None
        if starts and kind != "LSTM":
            self.start = nn.Parameter(torch.randn(layers * (1 + both_ways), 1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = x if self.batch_first else x.transpose(0, 1)
        given: Any = states
        if self.packed:
            lengths = torch.tensor([max(1, x.shape[1] - index) for index in range(x.shape[0])])
            given = pack_padded_sequence(states, lengths, batch_first=self.batch_first)
        start = None if self.start is None else self.start.expand(-1, x.shape[0], -1).contiguous().to(x.dtype)
        found, _ = self.inner(given) if start is None else self.inner(given, start)
        if self.packed:
            found, _ = pad_packed_sequence(found, batch_first=self.batch_first, total_length=x.shape[1])
        return found if self.batch_first else found.transpose(0, 1)


@layer("cells")
class Cells(Layer):
    """A recurrent cell in a loop over the first few steps."""

    takes = ("sequence",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"kind": rng.choice(sorted(CELLS)), "width": rng.choice((4, 8))}

    def __init__(self, stream: Stream, kind: str, width: int) -> None:
        super().__init__(stream)
        self.cell = CELLS[kind](stream.channels, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: Any = None
        states = []
        for step in x.unbind(1)[:5]:
            state = self.cell(step, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states, 1)


@layer("scan")
class Scan(Layer):
    takes = ("sequence",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("cumsum", "cumprod", "logcumsumexp", "cummax", "written", "decay"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how = how
        self.rate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how in ("cumsum", "logcumsumexp"):
            return getattr(torch, self.how)(x, 1)
        if self.how == "cumprod":
            return (1 + 0.1 * x.tanh()).cumprod(1)
        if self.how == "cummax":
            return x.cummax(1).values
        states = [x[:, 0]]
        for step in range(1, min(x.shape[1], 6)):
            states.append(self.rate * states[-1] + x[:, step])
        if self.how == "decay":
            return torch.stack(states, 1)
        written = torch.zeros_like(x)
        for step, state in enumerate(states):
            written[:, step] = state
        return written


@layer("token mixing")
class TokenMixing(Layer):
    takes = ("sequence",)

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self.inner = nn.Linear(stream.shape[1], stream.shape[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


@layer("experts")
class Experts(Layer):
    """A mixture whose experts all run, or whose tokens are sent to one each."""

    takes = ("sequence", "rows")

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"count": rng.choice((2, 3)), "sent": rng.random() < 0.4}

    def __init__(self, stream: Stream, count: int, sent: bool) -> None:
        super().__init__(stream)
        self.gate = nn.Linear(stream.channels, count)
        self.experts = nn.ModuleList(nn.Linear(stream.channels, stream.channels) for _ in range(count))
        self.sent = sent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(1, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).to(x.dtype) * weights
            if self.sent:  # the number of tokens depends on values: planned by regions
                rows = (chosen.flatten() == number).nonzero().flatten()
                picked = x.flatten(0, -2)[rows]
                out = out.flatten(0, -2).index_add(0, rows, expert(picked).to(x.dtype)).view_as(x)
            else:
                out = out + mine * expert(x)
        return out


@layer("to signal")
class ToSignal(Layer):
    takes = ("sequence",)
    makes = "signal"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


@layer("to image")
class ToImage(Layer):
    takes = ("sequence",)
    makes = "image"

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self.side = max(1, int(stream.shape[1] ** 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        picked = x[:, : self.side**2].transpose(1, 2)
        return picked.unflatten(2, (self.side, self.side))


@layer("to steps")
class ToSteps(Layer):
    takes = ("rows",)
    makes = "sequence"

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"length": rng.choice((2, 4)), "how": rng.choice(("expand", "repeat", "linear", "outer"))}

    def __init__(self, stream: Stream, length: int, how: str) -> None:
        super().__init__(stream)
        self.length, self.how = length, how
        self.inner = nn.Linear(stream.channels, stream.channels * length)
        self.places = nn.Parameter(torch.randn(length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "linear":
            return self.inner(x).unflatten(1, (self.length, -1))
        if self.how == "outer":
            return torch.einsum("nc,t->ntc", x, self.places.to(x.dtype))
        rows = x.unsqueeze(1)
        rows = rows.expand(-1, self.length, -1) if self.how == "expand" else rows.repeat(1, self.length, 1)
        return rows + self.places.to(x.dtype).unsqueeze(-1)


@layer("bilinear")
class Bilinear(Layer):
    takes = ("rows", "sequence")

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("bilinear", "cosine", "cdist"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how = how
        self.inner = nn.Bilinear(stream.channels, stream.channels, 4)
        self.centers = nn.Parameter(torch.randn(4, stream.channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "bilinear":
            return self.inner(x.contiguous(), x.flip(-1))
        centers = self.centers.to(x.dtype)
        if self.how == "cosine":
            return F.cosine_similarity(x.unsqueeze(-2), centers, dim=-1)
        if x.dtype == torch.bfloat16:
            return (x.unsqueeze(-2) - centers).square().sum(-1)
        return torch.cdist(x, centers)
