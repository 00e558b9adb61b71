"""What well-known architectures do in their middle: windows, messages, codes, rays, routing, memories, couplings."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from generated.layer import Layer, Stream, full_precision, layer


@layer("windows")
class Windows(Layer):
    """Attention within shifted windows of an image, with a bias by relative place and a mask."""

    takes = ("image",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"shifts": rng.random() < 0.7, "cosine": rng.random() < 0.4}

    def __init__(self, stream: Stream, shifts: bool, cosine: bool) -> None:
        super().__init__(stream)
        self.shift, self.cosine = int(shifts), cosine
        self.norm, self.qkv = nn.LayerNorm(stream.channels), nn.Linear(stream.channels, 3 * stream.channels)
        self.table = nn.Parameter(torch.randn(9, 1) * 0.1)
        places = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        apart = (places[:, :, None] - places[:, None, :] + 1).permute(1, 2, 0)
        self.register_buffer("index", apart[..., 0] * 3 + apart[..., 1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
        if not height or not width:
            return x
        y = self.norm(x.permute(0, 2, 3, 1))[:, :height, :width]
        y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        count, channels = y.shape[0] * height * width // 4, y.shape[-1]
        y = (
            y.view(y.shape[0], height // 2, 2, width // 2, 2, channels)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(-1, 4, channels)
        )
        query, key, value = self.qkv(y).chunk(3, -1)
        if self.cosine:
            query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        scores = query @ key.mT + self.table[self.index.view(-1)].view(4, 4).to(query.dtype)
        outside = torch.arange(count)[:, None, None] % 3 == torch.arange(4)[None, None]
        y = scores.masked_fill(outside & (self.shift > 0), -100.0).softmax(-1) @ value
        y = y.view(x.shape[0], height // 2, width // 2, 2, 2, channels).permute(0, 5, 1, 3, 2, 4)
        y = torch.roll(y.reshape(x.shape[0], channels, height, width), (self.shift, self.shift), (2, 3))
        return x + F.pad(y, (0, x.shape[3] - width, 0, x.shape[2] - height))


@layer("messages")
class Messages(Layer):
    """One round of messages between the steps of a sequence as nodes of a graph."""

    takes = ("sequence",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("mean", "degree", "attention", "most", "put", "gated"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how = how
        self.linear, self.score = nn.Linear(stream.channels, stream.channels), nn.Linear(2 * stream.channels, 1)
        self.cell = nn.GRUCell(stream.channels, stream.channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nodes = x.flatten(0, 1)
        count = len(nodes)
        source = torch.arange(2 * count) * 3 % count
        target = torch.arange(2 * count) * 5 % count
        sent = self.linear(nodes)[source]
        return (nodes.to(sent.dtype) + self._received(nodes, sent, source, target)).view(x.shape)

    def _received(
        self, nodes: torch.Tensor, sent: torch.Tensor, source: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        empty = sent.new_zeros(len(nodes), sent.shape[1])
        degree = sent.new_zeros(len(nodes)).index_add_(0, target, torch.ones_like(sent[:, 0])).clamp(min=1)
        if self.how == "mean":
            return empty.index_add(0, target, sent) / degree[:, None]
        if self.how == "degree":
            return empty.index_add_(0, target, sent * (degree.rsqrt()[source] * degree.rsqrt()[target]).unsqueeze(-1))
        if self.how == "most":
            return empty.scatter_reduce(0, target[:, None].expand_as(sent), sent, "amax", include_self=False)
        if self.how == "put":
            return empty.index_put((target,), sent.tanh(), accumulate=True)
        if self.how == "gated":
            return self.cell(empty.index_add(0, target, sent).to(nodes.dtype), nodes).to(sent.dtype)
        score = F.leaky_relu(self.score(torch.cat([nodes[source], nodes[target]], -1)).squeeze(-1), 0.2).to(sent.dtype)
        most = score.new_full((len(nodes),), -1e4).scatter_reduce(0, target, score.detach(), "amax")
        weights = (score - most[target]).exp()
        total = weights.new_zeros(len(nodes)).scatter_add(0, target, weights)
        return empty.index_add(0, target, (weights / (total[target] + 1e-6)).unsqueeze(-1) * sent)


@layer("code book")
class CodeBook(Layer):
    """The nearest of some codes in place of a vector; codes are moved in the forward, or trained."""

    takes = ("rows", "sequence")

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"averages": rng.random() < 0.5}

    def __init__(self, stream: Stream, averages: bool) -> None:
        super().__init__(stream)
        self.averages = averages
        self.codes = nn.Embedding(8, stream.channels)
        self.codes.weight.requires_grad_(not averages)
        self.register_buffer("sizes", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat, codes = x.flatten(0, -2), self.codes.weight
        distances = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ codes.t() + codes.pow(2).sum(1)
        chosen = distances.argmin(1)
        found = self.codes(chosen).view(x.shape)
        if self.averages and self.training:
            with torch.no_grad():
                hits = F.one_hot(chosen, 8).to(codes.dtype)
                self.sizes.mul_(0.9).add_(hits.sum(0).to(self.sizes.dtype), alpha=0.1)
                codes.mul_(0.9).add_(
                    (hits.t() @ flat.to(codes.dtype)) / (self.sizes.to(codes.dtype)[:, None] + 1), alpha=0.1
                )
            found = found.detach()
        return x + (found - x).detach() + 0.1 * (found - x.detach())


@layer("rays")
class Rays(Layer):
    """Densities along a ray composed into weights, of which several sums are read."""

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"product": rng.random() < 0.5}

    def __init__(self, stream: Stream, product: bool) -> None:
        super().__init__(stream)
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            y = full_precision(x)
            passed = (-F.relu(y + 0.1 * torch.randn_like(y))).exp()
            if self.product:
                light = torch.cat([torch.ones_like(y[..., :1]), passed + 1e-6], -1).cumprod(-1)[..., :-1]
            else:
                light = (-F.pad((1 - passed)[..., :-1], (1, 0)).cumsum(-1)).exp()
            weights = (1 - passed) * light
            depth = (weights * torch.linspace(0, 1, y.shape[-1], dtype=y.dtype)).sum(-1, keepdim=True)
            return (weights * y + depth + weights.sum(-1, keepdim=True)).to(x.dtype)


@layer("routing")
class Routing(Layer):
    """Votes that agree are given more weight, in three rounds."""

    takes = ("sequence",)

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self.vote = nn.Linear(stream.channels, 2 * stream.channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        votes = self.vote(x).unflatten(-1, (2, -1))
        agreed = votes.new_zeros(*votes.shape[:3], 1)
        for round_ in range(3):
            total = (agreed.softmax(2) * (votes if round_ == 2 else votes.detach())).sum(1, keepdim=True)
            length = total.square().sum(-1, keepdim=True)
            total = length / (1 + length) * total / (length + 1e-6).sqrt()
            agreed = agreed + (votes * total).sum(-1, keepdim=True)
        return x + total.mean(2).to(x.dtype)


@layer("memory")
class Memory(Layer):
    """A memory that every step of a sequence reads and writes by what it holds."""

    takes = ("sequence",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"cell": rng.choice(("gru", "lstm"))}

    def __init__(self, stream: Stream, cell: str) -> None:
        super().__init__(stream)
        width = stream.channels
        self.long = cell == "lstm"
        self.cell = (nn.LSTMCell if self.long else nn.GRUCell)(2 * width, width)
        self.key, self.erase, self.add = (nn.Linear(width, width) for _ in range(3))
        self.start = nn.Parameter(torch.randn(4, width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.start.expand(x.shape[0], -1, -1)
        hidden = inner = read = x.new_zeros(x.shape[0], x.shape[2])
        steps = []
        for step in x.unbind(1)[:4]:
            given = torch.cat([step, read.to(step.dtype)], 1)
            if self.long:
                hidden, inner = self.cell(given, (hidden, inner))
            else:
                hidden = self.cell(given, hidden)
            weights = F.cosine_similarity(memory, self.key(hidden).unsqueeze(1), dim=-1).softmax(1).unsqueeze(-1)
            memory = memory * (1 - weights * self.erase(hidden).sigmoid().unsqueeze(1))
            memory = memory + weights * self.add(hidden).tanh().unsqueeze(1)
            read = (weights * memory).sum(1)
            steps.append(read)
        return x + torch.stack(steps, 1).mean(1, keepdim=True).to(x.dtype)


@layer("coupling")
class Coupling(Layer):
    """Halves that scale and move each other in turn, with the logarithms of scales summed beside."""

    takes = ("rows",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"in_place": rng.random() < 0.5, "turns": rng.choice((1, 2, 3))}

    def __init__(self, stream: Stream, in_place: bool, turns: int) -> None:
        super().__init__(stream)
        self.in_place, self.half = in_place, stream.channels // 2
        rest = stream.channels - self.half
        self.nets = nn.ModuleList(
            nn.Linear(*((self.half, 2 * rest) if turn % 2 else (rest, 2 * self.half))) for turn in range(turns)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = x[:, : self.half], x[:, self.half :]
        total = x.new_zeros(len(x))
        for turn, net in enumerate(self.nets):
            scale, move = net(one if turn % 2 else other).tanh().to(x.dtype).chunk(2, 1)
            if turn % 2:
                other = other * scale.exp() + move
            else:
                one = one * scale.exp() + move
            if self.in_place:
                total += scale.sum(1)
            else:
                total = total + scale.sum(1)
        return torch.cat([one, other], 1) + 0.1 * total.unsqueeze(1)


@layer("tied")
class Tied(Layer):
    """Two layers that have one weight, under two names."""

    takes = ("rows", "sequence")

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self.one, self.other = (nn.Linear(stream.channels, stream.channels) for _ in range(2))
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(F.silu(self.one(x)))


LATER = ("windows", "messages", "code book", "rays", "routing", "memory", "coupling", "tied")
