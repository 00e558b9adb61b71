"""Indexing, views, in-place chains and other operators on whole tensors, for every domain."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from generated.layer import Layer, Stream, full_precision, layer


@layer("indexing")
class Indexing(Layer):
    """One of many ways to pick, move and add up elements along the last axis."""

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(sorted(INDEXING))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.run = INDEXING[how]
        length = stream.shape[-1]
        self.register_buffer("places", torch.arange(length).flip(0).roll(1), persistent=False)
        self.register_buffer("mask", torch.arange(length) % 2 == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x, self.places, self.mask)


Operator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _wide(operator: Callable[[torch.Tensor], torch.Tensor]) -> Operator:
    """For what has no kernel in 16 bits."""

    def run(x: torch.Tensor, places: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return operator(full_precision(x)).to(x.dtype)

    return run


def _scattered_top(x: torch.Tensor, places: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    values, top = x.topk(max(1, x.shape[-1] // 2), -1)
    return torch.zeros_like(x).scatter(-1, top, values)


def _strided(x: torch.Tensor, places: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride()) + x.flatten().as_strided((x.shape[-1],), (1,))


def _overlapping(x: torch.Tensor, places: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.unfold(-1, min(2, x.shape[-1]), 1).sum(-1)


def _diagonal(x: torch.Tensor) -> torch.Tensor:
    return torch.diag_embed(x).tril().sum(-1)


def _solved(x: torch.Tensor) -> torch.Tensor:
    rows = x.flatten(0, -2)
    matrix = rows.mT @ rows + 4 * torch.eye(x.shape[-1], dtype=x.dtype)
    return torch.linalg.solve(matrix, rows.mT).mT.view(x.shape)


def _turned(x: torch.Tensor) -> torch.Tensor:
    rows = x.flatten(0, -2)
    return (rows @ torch.matrix_exp(0.1 * (rows.mT @ rows).tanh())).view(x.shape)


def _factored(x: torch.Tensor) -> torch.Tensor:
    rows = x.flatten(0, -2)
    matrix = rows.mT @ rows + 4 * torch.eye(x.shape[-1], dtype=x.dtype)
    return (rows @ torch.linalg.cholesky(matrix)).view(x.shape)


def _reduced(x: torch.Tensor) -> torch.Tensor:
    return x.index_reduce(0, torch.zeros(len(x), dtype=torch.long), x * 0.5, "mean")


INDEXING: dict[str, Operator] = {
    "gather": lambda x, places, mask: x.gather(-1, places.expand_as(x)),
    "index": lambda x, places, mask: x[..., places],
    "list": lambda x, places, mask: x[..., [0, -1]],
    "mask": lambda x, places, mask: x * mask,
    "index_select": lambda x, places, mask: x.index_select(-1, places),
    "take_along_dim": lambda x, places, mask: x.take_along_dim(places.expand_as(x), -1),
    "scatter_add": lambda x, places, mask: torch.zeros_like(x).scatter_add(-1, (places // 2).expand_as(x), x),
    "scatter_reduce": lambda x, places, mask: x.scatter_reduce(-1, (places // 2).expand_as(x), x, "amax"),
    "index_add": lambda x, places, mask: x.index_add(-1, places // 2, x, alpha=0.5),
    "index_copy": lambda x, places, mask: x.index_copy(-1, places, x * 2),
    "index_fill": lambda x, places, mask: x.index_fill(-1, places[:1], 0.5),
    "index_put": lambda x, places, mask: (
        x.movedim(-1, 0).index_put((places // 2,), x.movedim(-1, 0), True).movedim(0, -1)
    ),
    "masked_fill": lambda x, places, mask: x.masked_fill(mask, 0.1),
    "masked_scatter": lambda x, places, mask: x.masked_scatter(mask.expand_as(x), x.flip(-1).contiguous()),
    "where": lambda x, places, mask: torch.where(mask, x, x.roll(1, -1)),
    "topk": _scattered_top,
    "sort": lambda x, places, mask: x.sort(-1).values,
    "sort and gather": lambda x, places, mask: x.gather(-1, x.argsort(-1, descending=True)),
    "kthvalue": lambda x, places, mask: x - x.kthvalue(1, -1, keepdim=True).values,
    "median": lambda x, places, mask: x - x.median(-1, keepdim=True).values,
    "cumsum": lambda x, places, mask: x.cumsum(-1) / 4,
    "flip": lambda x, places, mask: x.flip(-1) + x,
    "roll": lambda x, places, mask: x.roll((1, 2), (0, -1)),
    "one_hot": lambda x, places, mask: x + nn.functional.one_hot(places, len(places)).to(x.dtype).sum(0),
    "bucketize": lambda x, places, mask: x * torch.bucketize(x.detach().float(), torch.tensor([-0.5, 0.5])),
    "repeat_interleave": lambda x, places, mask: x.repeat_interleave(2, -1)[..., ::2],
    "expand": lambda x, places, mask: (x.unsqueeze(0).expand(3, *x.shape) * 0.5).mean(0),
    "movedim": lambda x, places, mask: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "views": lambda x, places, mask: x.contiguous().view(-1).view(x.shape[0], -1).T.reshape(-1).view(x.shape),
    "slices": lambda x, places, mask: torch.cat([x[..., ::2], x[..., 1::2]], -1),
    "narrow": lambda x, places, mask: x.narrow(-1, 0, max(1, x.shape[-1] - 1)),
    "stack": lambda x, places, mask: torch.stack([x, x.neg()], 1).flatten(1, 2).narrow(1, 0, x.shape[1]),
    "meshgrid": lambda x, places, mask: x * torch.linspace(0.5, 1, x.shape[-1], dtype=x.dtype),
    "as_strided": _strided,
    "unfold": _overlapping,
    "einsum": lambda x, places, mask: torch.einsum("...i,...j->...i", x, x.tanh()) / x.shape[-1],
    "outer": lambda x, places, mask: (x.unsqueeze(-1) * x.unsqueeze(-2)).mean(-1),
    "fft": _wide(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 0.5, n=x.shape[-1])),
    "fft 2": _wide(lambda x: torch.fft.fft2(x, dim=(0, -1)).real),
    "complex": _wide(lambda x: torch.view_as_real(torch.complex(x, x.sin()) * (1 + 0.5j)).sum(-1)),
    "polar": _wide(lambda x: torch.polar(x.abs() + 0.1, x).abs() + x),
    "diagonal": _wide(_diagonal),
    "solve": _wide(_solved),
    "cholesky": _wide(_factored),
    "matrix_exp": _wide(_turned),
    "prod": _wide(lambda x: x * (1 + 0.1 * x.tanh()).prod(-1, keepdim=True)),
    "renorm": _wide(lambda x: x.renorm(2, 0, 1.0)),
    "histogram": _wide(lambda x: x + torch.histc(x.detach(), 4).sum() / x.numel()),
    "trapezoid": _wide(lambda x: x + torch.trapezoid(x, dim=-1).unsqueeze(-1)),
    "diff": lambda x, places, mask: x + torch.diff(x, dim=-1, prepend=x[..., :1]),
    "index by two": lambda x, places, mask: (
        x.movedim(-1, 0)[places, torch.zeros_like(places)].movedim(0, -1).unsqueeze(0) + x
    ),
    "index with none": lambda x, places, mask: x[:, None][..., places][:, 0],
    "index by mask": lambda x, places, mask: x[..., mask],
    "index_reduce": _wide(_reduced),
    "take": lambda x, places, mask: x + x.take(places),
    "put": lambda x, places, mask: x.put(places, x.flatten()[: len(places)] * 2, accumulate=True),
    "select_scatter": lambda x, places, mask: x.select_scatter(x.select(-1, 0) * 2, -1, 0),
    "slice_scatter": lambda x, places, mask: x.slice_scatter(x[..., :1] * 2, -1, 0, 1),
    "diagonal_scatter": lambda x, places, mask: x.diagonal_scatter(torch.ones_like(x.diagonal(0, 0, -1)), 0, 0, -1),
    "diagonal view": lambda x, places, mask: x + x.diagonal(0, 0, -1).mean(),
    "tensor_split": lambda x, places, mask: torch.cat(x.tensor_split(3, -1)[::-1], -1),
    "hstack": lambda x, places, mask: torch.hstack([x, x * 2]).narrow(1, 0, x.shape[1]),
    "rot90": lambda x, places, mask: torch.rot90(x, 2, (0, -1)),
    "triu": lambda x, places, mask: x.unsqueeze(-1).expand(*x.shape, x.shape[-1]).triu().sum(-2),
    "tile": lambda x, places, mask: x.tile((2,) + (1,) * (x.dim() - 1)).narrow(0, 0, x.shape[0]),
    "where of one": lambda x, places, mask: x * (mask.nonzero().sum() + 1),
    "searchsorted": _wide(lambda x: x * torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype), x.detach())),
    "argmax": lambda x, places, mask: x * (x.argmax(-1, keepdim=True) + 1),
    "nonzero where": lambda x, places, mask: torch.where(x > 0, x, torch.zeros((), dtype=x.dtype)),
    "split sizes": lambda x, places, mask: torch.cat(list(reversed(x.split([1, x.shape[0] - 1]))), 0),
    "broadcast": lambda x, places, mask: torch.broadcast_tensors(x, mask.to(x.dtype))[1] * x,
    "flat views": lambda x, places, mask: (
        x.contiguous().view(-1)[: x.numel()].view_as(x).mul(1.1).reshape(-1).reshape(x.shape)
    ),
    "swapped": lambda x, places, mask: x.swapaxes(0, -1).contiguous().swapaxes(0, -1) * x.mT.mT,
    "strided expand": lambda x, places, mask: (
        x.mean(-1, keepdim=True).expand_as(x) * x.select(-1, 0).unsqueeze(-1).expand_as(x)
    ),
    "double index": lambda x, places, mask: x[..., places][..., places],
    "scatter multiply": lambda x, places, mask: torch.ones_like(x).scatter_reduce(-1, places.expand_as(x), x, "prod"),
    "scatter mean": lambda x, places, mask: x.scatter_reduce(
        -1, (places // 2).expand_as(x), x, "mean", include_self=False
    ),
    "scatter value": lambda x, places, mask: x.scatter(-1, places[:1].expand(*x.shape[:-1], 1), 0.5),
    "isin": lambda x, places, mask: x.masked_fill(torch.isin(places, torch.tensor([0, 2])), 0.0),
    "tensordot": lambda x, places, mask: torch.tensordot(x, x.detach().flatten(0, -2).mean(0), 1).unsqueeze(-1) + x,
}


@layer("in place")
class InPlace(Layer):
    """A chain of operators that write over what they read, and into parts of it."""

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        steps = [rng.choice(sorted(IN_PLACE)) for _ in range(rng.randint(0, 3))]
        return {"steps": [*steps, rng.choice(sorted({**IN_PLACE, **IN_PLACE_LAST}))]}

    def __init__(self, stream: Stream, steps: list[str]) -> None:
        super().__init__(stream)
        self.steps = steps
        self.scale = nn.Parameter(torch.ones(stream.shape[-1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale.to(x.dtype)
        for step in self.steps:
            {**IN_PLACE, **IN_PLACE_LAST}[step](x)
        return x


def _set_slice(x: torch.Tensor) -> None:
    x[..., :1] = 0.5


def _scale_slice(x: torch.Tensor) -> None:
    x[..., ::2] *= 2


def _set_masked(x: torch.Tensor) -> None:
    x[x.detach() > 1] = 1.0


def _through_view(x: torch.Tensor) -> None:
    x.transpose(0, -1).add_(1)


def _copy_row(x: torch.Tensor) -> None:
    x[:1].copy_(x[-1:].clone())


def _write_chunks(x: torch.Tensor) -> None:
    for number, part in enumerate(x.chunk(2, 0)):
        part.mul_(number + 0.5)


def _write_rows(x: torch.Tensor) -> None:
    for number in range(min(3, x.shape[0])):
        x[number] = x[number].detach() * 0.5 + number


def _write_own_slice(x: torch.Tensor) -> None:
    x[..., 1:] = x[..., :-1].clone() * 0.5


def _broadcast_into(x: torch.Tensor) -> None:
    x += torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)


def _view_of_view(x: torch.Tensor) -> None:
    x.unsqueeze(0).transpose(0, 1).select(0, 0).narrow(-1, 0, 1).sub_(0.3)


def _put(x: torch.Tensor) -> None:
    x.index_put_((torch.tensor([0, 0]),), torch.ones(2, *x.shape[1:], dtype=x.dtype), accumulate=True)


def _scatter(x: torch.Tensor) -> None:
    x.scatter_add_(0, torch.zeros_like(x, dtype=torch.long), x.detach() * 0.1)


def _diagonal_in_place(x: torch.Tensor) -> None:
    x.diagonal(0, 0, -1).zero_()


def _without_gradient(x: torch.Tensor) -> None:
    with torch.no_grad():
        x.mul_(0.7)


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda x: x.add_(0.5),
    "mul": lambda x: x.mul_(0.9),
    "clamp": lambda x: x.clamp_(-2, 2),
    "add itself": lambda x: x.add_(x.detach() * 0.5),
    "slice": _set_slice,
    "strided slice": _scale_slice,
    "masked": _set_masked,
    "view": _through_view,
    "copy": _copy_row,
    "fill": lambda x: x.select(-1, 0).fill_(0.25),
    "index_add": lambda x: x.index_add_(0, torch.zeros(1, dtype=torch.long), torch.ones_like(x[:1])),
    "masked_fill": lambda x: x.masked_fill_(x.detach() < -1, -1.0),
    "silu": lambda x: nn.functional.silu(x, inplace=True),
    "chunks": _write_chunks,
    "rows": _write_rows,
    "own slice": _write_own_slice,
    "broadcast": _broadcast_into,
    "view of view": _view_of_view,
    "put": _put,
    "scatter": _scatter,
    "diagonal": _diagonal_in_place,
    "no_grad": _without_gradient,
    "detached": lambda x: x.detach().mul_(0.8),
    "data": lambda x: x.data.add_(0.1),
    "where": lambda x: x.copy_(torch.where(x > 0, x, x * 0.1)),
    "noise": lambda x: x.add_(torch.empty_like(x).uniform_(-0.1, 0.1)),
    "zero": lambda x: x[..., -1:].zero_(),
    "flat": lambda x: x.view(-1)[:2].fill_(0.5) if x.is_contiguous() else x.add_(1),
    "lerp": lambda x: x.lerp_(x.detach().flip(0), 0.3),
    "sub": lambda x: x.sub_(x.mean(-1, keepdim=True)),
    "div": lambda x: x.div_(2).neg_(),
    "addcdiv": lambda x: x.addcdiv_(x.detach(), x.detach().square() + 1),
    "addcmul": lambda x: x.addcmul_(x.detach(), x.detach(), value=0.1),
}
IN_PLACE_LAST: dict[str, Callable[[torch.Tensor], Any]] = {
    "relu": lambda x: x.relu_(),
    "leaky": lambda x: nn.functional.leaky_relu_(x, 0.1),
    "sigmoid": lambda x: x.sigmoid_(),
    "tanh": lambda x: x.tanh_(),
    "exp": lambda x: x.clamp_(max=2).exp_(),
    "elu": lambda x: nn.functional.elu_(x),
    "hardtanh": lambda x: nn.functional.hardtanh_(x),
    "selu": lambda x: nn.functional.selu_(x),
    "celu": lambda x: nn.functional.celu_(x),
    "rrelu": lambda x: nn.functional.rrelu_(x, training=True),
    "threshold": lambda x: nn.functional.threshold_(x, 0.1, 0.2),
    "dropout": lambda x: nn.functional.dropout(x, 0.3, inplace=True),
    "sqrt": lambda x: x.clamp_(0.1, 3).sqrt_(),
    "hardswish": lambda x: nn.functional.hardswish(x, inplace=True),
    "sine": lambda x: x.sin_(),
    "cumsum": lambda x: x.cumsum_(-1),
    "pow": lambda x: x.pow_(2),
}  # these keep what they make for the backward: nothing may write over it
