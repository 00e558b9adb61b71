"""Matrices and special functions: decompositions, distances, spectra, statistics."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from generated.layer import EVERY, Layer, Stream, full_precision, layer

Function = Callable[[torch.Tensor], torch.Tensor]


@layer("algebra")
class Algebra(Layer):
    """A function of (rows, channels) that gives as many, or one number for each row or channel."""

    takes = EVERY

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(sorted(ALGEBRA))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how = how
        self.scale = nn.Parameter(torch.ones(stream.shape[-1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            rows = full_precision(x * self.scale).flatten(0, -2)[:64]
            made = ALGEBRA[self.how](rows)
        if made.dim() and made.shape[-1] == x.shape[-1]:
            made = made.flatten(0, -2).mean(0) if made.dim() > 1 else made
        else:
            made = made.mean()
        return x + 0.1 * made.to(x.dtype)


def _gram(x: torch.Tensor) -> torch.Tensor:
    return x.mT @ x + torch.diag(torch.arange(1, x.shape[1] + 1, dtype=x.dtype))


def _least_squares(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.lstsq(_gram(x), x.mT).solution.mT


def _triangular(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve_triangular(_gram(x).tril(), x.mT, upper=False).mT


def _cholesky_solved(x: torch.Tensor) -> torch.Tensor:
    return torch.cholesky_solve(x.mT, torch.linalg.cholesky(_gram(x))).mT


def _spectrogram(x: torch.Tensor) -> torch.Tensor:
    signal = F.pad(x.flatten(), (0, max(0, 16 - x.numel())))
    spectrum = torch.stft(signal, 8, 4, window=torch.hann_window(8, dtype=x.dtype), return_complex=True)
    back = torch.istft(spectrum, 8, 4, window=torch.hann_window(8, dtype=x.dtype))
    return spectrum.abs().mean() + back.mean()


def _low_rank(x: torch.Tensor) -> torch.Tensor:
    left, values, right = torch.linalg.svd(_gram(x), full_matrices=False)
    return values + 0 * left.detach().sum() + 0 * right.detach().sum()


ALGEBRA: dict[str, Function] = {
    "det": lambda x: torch.linalg.det(_gram(x.tanh()) / x.shape[1]),
    "slogdet": lambda x: torch.linalg.slogdet(_gram(x)).logabsdet,
    "logdet": lambda x: torch.logdet(_gram(x)),
    "inv": lambda x: torch.linalg.inv(_gram(x)),
    "pinv": lambda x: torch.linalg.pinv(_gram(x), hermitian=True),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(_gram(x)),
    "eigh": lambda x: torch.linalg.eigh(_gram(x)).eigenvectors.abs(),
    "svdvals": lambda x: torch.linalg.svdvals(_gram(x)),
    "svd": _low_rank,
    "qr": lambda x: torch.linalg.qr(_gram(x)).R,
    "lstsq": _least_squares,
    "triangular": _triangular,
    "cholesky_solve": _cholesky_solved,
    "matrix_power": lambda x: torch.linalg.matrix_power(_gram(x) / x.shape[1], 3),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, x.mT, x]),
    "nuclear": lambda x: torch.linalg.matrix_norm(_gram(x), "nuc"),
    "frobenius": lambda x: torch.linalg.matrix_norm(x),
    "vector norm": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
    "infinite norm": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1),
    "cov": lambda x: torch.cov(torch.cat([x, x.flip(0) * 0.5]).mT),
    "corrcoef": lambda x: torch.corrcoef(torch.cat([x, x.flip(1) * 0.5 + 1]).mT).nan_to_num(),
    "cdist": lambda x: torch.cdist(x, x.flip(1) + 1),
    "cdist 1": lambda x: torch.cdist(x, x.flip(1) + 1, p=1.0),
    "pdist": lambda x: F.pdist(torch.cat([x, x + 1])).mean(),
    "pairwise": lambda x: F.pairwise_distance(x, x.flip(1) + 1),
    "dist": lambda x: torch.dist(x, x.flip(1) + 1),
    "kron": lambda x: torch.kron(x[:3], x[:2]).sum(),
    "block_diag": lambda x: torch.block_diag(x[:3], x[:2]).mean(0).sum(),
    "cross": lambda x: torch.linalg.cross(
        x[:, :1].expand(-1, 3), x.mean(1, keepdim=True) + torch.eye(3, dtype=x.dtype)[0]
    ).sum(),
    "addmm": lambda x: torch.addmm(x, x, _gram(x), beta=0.5, alpha=0.1),
    "addbmm": lambda x: torch.addbmm(_gram(x), x.mT.unsqueeze(0), x.unsqueeze(0)),
    "mv": lambda x: torch.mv(x, x.mean(0)),
    "addr": lambda x: torch.addr(_gram(x), x.mean(0), x[0]),
    "vander": lambda x: torch.linalg.vander(x.mean(0).tanh(), N=3).sum(1),
    "quantile": lambda x: torch.quantile(x, torch.tensor([0.3, 0.7], dtype=x.dtype), dim=0),
    "nansum": lambda x: x.nansum(0) + x.nanmean(),
    "cummin": lambda x: x.cummin(0).values,
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "cumprod": lambda x: x.tanh().add(1.5).cumprod(0) if len(x) < 9 else x,
    "cumulative trapezoid": lambda x: torch.cumulative_trapezoid(x, dim=1).sum(),
    "stft": _spectrogram,
    "rfft2": lambda x: torch.fft.rfft2(x).abs(),
    "hfft": lambda x: torch.fft.hfft(x.to(torch.complex64), n=4).sum(1),
    "ifft": lambda x: torch.fft.ifft(torch.fft.fftshift(torch.fft.fft(x))).imag,
    "convolved": lambda x: F.conv1d(x.unsqueeze(1), x[:1, :1].unsqueeze(0), padding=1).squeeze(1),
    "lgamma": lambda x: torch.lgamma(x.abs() + 1) + torch.digamma(x.abs() + 1),
    "erfinv": lambda x: torch.erfinv(x.tanh() * 0.9) + torch.erfc(x),
    "expm1": lambda x: torch.expm1(x.tanh()) + torch.log1p(x.abs()),
    "sinc": lambda x: torch.sinc(x) + torch.special.i0e(x),
    "entropy": lambda x: torch.special.entr(x.softmax(1)) + torch.logit(x.sigmoid(), eps=1e-3),
    "float_power": lambda x: torch.float_power(x.abs() + 0.1, 0.7).to(x.dtype),
    "fmod": lambda x: torch.fmod(x, 0.7) + torch.frac(x) + torch.remainder(x, 0.3),
    "copysign": lambda x: torch.copysign(x, -x.detach()) + torch.ldexp(x, torch.tensor([1])),
    "heaviside": lambda x: x * torch.heaviside(x.detach(), torch.tensor([0.5], dtype=x.dtype)) + x.sign(),
    "acos": lambda x: torch.acos(x.tanh() * 0.9) + torch.asinh(x) + torch.atanh(x.tanh() * 0.5),
    "cosh": lambda x: torch.cosh(x.tanh()) + torch.tan(x.tanh()) + torch.log2(x.abs() + 1) + torch.exp2(x.tanh()),
    "minimum": lambda x: torch.minimum(x, x.flip(0)) + torch.fmax(x, x.flip(1)),
    "deg2rad": lambda x: torch.deg2rad(x * 90) + x.reciprocal().clamp(-1, 1) + x.trunc(),
    "clamp by tensors": lambda x: x.clamp(x.mean(0).detach() - 1, x.mean(0) + 1),
    "rounded": lambda x: x.round(decimals=1) + x.ceil() * x,
    "mode": lambda x: x - x.mode(1, keepdim=True).values,
    "unique": lambda x: torch.unique(x.detach().round()).sum() * x,
    "rank": lambda x: x.msort() + x.diff(dim=0).sum(),
}


@layer("distribution")
class Distribution(Layer):
    """Draws through `torch.distributions`, and densities of them."""

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("normal", "reparametrized", "categorical", "gumbel", "gamma", "beta", "dirichlet"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how = how
        self.spread = nn.Parameter(torch.zeros(stream.shape[-1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch import distributions

        wide = full_precision(x)
        positive = F.softplus(wide) + 0.1
        if self.how == "normal":
            normal = distributions.Normal(wide, F.softplus(self.spread), validate_args=False)
            return (wide + 0.1 * normal.rsample() - 0.01 * normal.log_prob(wide.detach() + 1)).to(x.dtype)
        if self.how == "reparametrized":
            return (wide + torch.randn_like(wide) * (0.5 * self.spread).exp()).to(x.dtype)
        if self.how == "categorical":
            categorical = distributions.Categorical(logits=wide, validate_args=False)
            return (wide * categorical.log_prob(categorical.sample()).unsqueeze(-1)).to(x.dtype)
        if self.how == "gumbel":
            return F.gumbel_softmax(wide, tau=0.7, hard=True, dim=-1).to(x.dtype) * x
        if self.how == "gamma":
            return distributions.Gamma(positive, positive, validate_args=False).rsample().to(x.dtype)
        if self.how == "beta":
            return distributions.Beta(positive, positive + 1, validate_args=False).rsample().to(x.dtype)
        return distributions.Dirichlet(positive, validate_args=False).rsample().to(x.dtype)
