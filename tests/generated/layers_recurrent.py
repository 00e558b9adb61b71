"""Recurrent layers with what is asked for less often: states handed on, projections, sequences in any order."""

import random
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from generated.layer import Layer, Stream, layer


@layer("recurrent form")
class RecurrentForm(Layer):
    takes = ("sequence",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        hows = ("projected", "states", "relu", "any order", "packed data", "both states", "carried", "stacked cells")
        return {
            "how": rng.choice((*hows, "encoder and decoder", "listed", "reversed", "unbatched")),
            "both": rng.random() < 0.3,
        }

    def __init__(self, stream: Stream, how: str, both: bool) -> None:
        super().__init__(stream)
        width, size = stream.channels, 4
        self.how = how
        options: dict[str, Any] = {"batch_first": True, "bidirectional": both}
        self.inner: nn.Module
        if how == "projected":
            self.inner = nn.LSTM(width, size, 2, proj_size=2, dropout=0.1, **options)
        elif how == "relu":
            self.inner = nn.RNN(width, size, 2, nonlinearity="relu", **options)
        elif how in ("both states", "encoder and decoder", "carried"):
            self.inner = nn.LSTM(width, size, batch_first=True)
        else:
            self.inner = nn.GRU(width, size, **options)
        self.other = nn.LSTM(width, size, batch_first=True)
        self.cells = nn.ModuleList([nn.GRUCell(width, size), nn.GRUCell(size, size)])
        self.start = nn.Parameter(torch.randn(2, 1, 1, size) * 0.3)
        self.register_buffer("carried", torch.zeros(2, 1, 1, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how in ("any order", "packed data", "listed"):
            return self._packed(x)
        if self.how == "states":
            _, states = self.inner(x)
            return states.transpose(0, 1)
        if self.how == "both states":
            hidden, cell = (each.expand(-1, x.shape[0], -1).contiguous().to(x.dtype) for each in self.start)
            found, (hidden, cell) = self.inner(x, (hidden, cell))
            return found + hidden.transpose(0, 1) * cell.transpose(0, 1)
        if self.how == "encoder and decoder":
            _, states = self.inner(x)
            return self.other(x.flip(1), states)[0]
        if self.how == "carried":
            hidden, cell = (each.expand(-1, x.shape[0], -1).contiguous().to(x.dtype) for each in self.carried)
            found, (hidden, cell) = self.inner(x, (hidden, cell))
            self.carried.copy_(torch.stack([hidden, cell]).detach().mean(2, keepdim=True))
            return found
        if self.how == "stacked cells":
            return self._cells(x)
        if self.how == "reversed":
            return self.inner(x.flip(1))[0].flip(1)
        if self.how == "unbatched":
            return torch.stack([self.inner(each)[0] for each in x.unbind(0)[:3]])
        return self.inner(x)[0]

    def _packed(self, x: torch.Tensor) -> torch.Tensor:
        lengths = [max(1, x.shape[1] - (3 * place) % x.shape[1]) for place in range(x.shape[0])]
        if self.how == "listed":
            packed = pack_sequence(
                [each[:length] for each, length in zip(x, lengths, strict=True)], enforce_sorted=False
            )
        else:
            packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
        if self.how == "packed data":
            packed = PackedSequence(packed.data.tanh() * 2, *packed[1:])
        found, states = self.inner(packed)
        padded, _ = pad_packed_sequence(found, batch_first=True, padding_value=0.5)
        return padded + states.mean()

    def _cells(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (torch.zeros(x.shape[0], 4, dtype=x.dtype) for _ in range(2))
        made = []
        for time in range(min(4, x.shape[1])):
            first = self.cells[0](x[:, time], first)
            second = self.cells[1](nn.functional.dropout(first, 0.1, self.training), second) + first
            made.append(second)
        return torch.stack(made, dim=1)
