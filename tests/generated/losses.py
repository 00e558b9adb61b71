"""Losses of `torch.nn`, each of some rows and of targets that the rows' shape gives."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Criterion = Callable[[torch.Tensor], torch.Tensor]


def rows_of(output: torch.Tensor) -> torch.Tensor:
    """(batch, classes) of anything real, at least two classes wide."""
    rows = output.reshape(output.shape[0] if output.dim() else 1, -1)
    return rows if rows.shape[1] > 1 else torch.cat([rows, rows * 0.5], 1)


def classes(rows: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(rows)) % rows.shape[1]


def shares(rows: torch.Tensor) -> torch.Tensor:
    """A probability for every class."""
    return torch.linspace(-1, 1, rows.shape[1], dtype=rows.dtype).softmax(0).expand_as(rows)


def signs(rows: torch.Tensor) -> torch.Tensor:
    return (torch.arange(len(rows)) % 2 * 2 - 1).to(rows.dtype)


def _grid_of_classes(rows: torch.Tensor) -> torch.Tensor:
    images = rows[:, : rows.shape[1] // 2 * 2].unflatten(1, (2, -1, 1))
    return F.nll_loss(images.log_softmax(1), torch.zeros(images[:, 0].shape, dtype=torch.long), reduction="sum") / 8


def _alignment(rows: torch.Tensor) -> torch.Tensor:
    steps, labels = 6, torch.ones(len(rows), 2, dtype=torch.long)
    labels[:, 1:] = 0 if rows.shape[1] < 3 else 2
    many = rows[:, :16].unsqueeze(0).expand(steps, -1, -1) * torch.linspace(0.5, 1, steps).to(rows.dtype).view(-1, 1, 1)
    lengths = torch.full((len(rows),), 1 if rows.shape[1] < 3 else 2)
    return nn.CTCLoss(zero_infinity=True)(many.log_softmax(-1), labels, torch.full((len(rows),), steps), lengths)


def _labels(rows: torch.Tensor) -> torch.Tensor:
    labels = torch.full(rows.shape, -1)
    labels[:, 0] = classes(rows)
    return labels


def _variances(rows: torch.Tensor) -> torch.Tensor:
    return F.gaussian_nll_loss(rows, torch.zeros_like(rows), F.softplus(rows.flip(1)) + 0.1, full=True)


LOSSES: dict[str, Criterion] = {
    "l1": lambda rows: nn.L1Loss()(rows, torch.full_like(rows, 0.3)),
    "mse": lambda rows: nn.MSELoss(reduction="sum")(rows, shares(rows)) / 8,
    "smooth l1": lambda rows: nn.SmoothL1Loss(beta=0.5)(rows, shares(rows)),
    "huber": lambda rows: nn.HuberLoss(delta=0.3)(rows, shares(rows)),
    "labels": lambda rows: nn.CrossEntropyLoss(label_smoothing=0.1)(rows, classes(rows)),
    "weighted": lambda rows: nn.CrossEntropyLoss(shares(rows)[0] + 0.5, ignore_index=1)(rows, classes(rows) // 2 * 2),
    "probabilities": lambda rows: nn.CrossEntropyLoss(reduction="none")(rows, shares(rows)).mean(),
    "nll": lambda rows: nn.NLLLoss()(rows.log_softmax(1), classes(rows)),
    "nll 2d": _grid_of_classes,
    "kl": lambda rows: nn.KLDivLoss(reduction="batchmean")(rows.log_softmax(1), shares(rows)),
    "kl of logs": lambda rows: nn.KLDivLoss(log_target=True, reduction="sum")(rows.log_softmax(1), shares(rows).log()),
    "bce": lambda rows: nn.BCELoss()(rows.sigmoid(), shares(rows)),
    "bce with logits": lambda rows: nn.BCEWithLogitsLoss(pos_weight=shares(rows)[0] + 1)(rows, shares(rows)),
    "poisson": lambda rows: nn.PoissonNLLLoss(full=True)(rows.clamp(max=3), shares(rows) * 9),
    "gaussian": _variances,
    "ctc": _alignment,
    "cosine": lambda rows: nn.CosineEmbeddingLoss(margin=0.2)(rows, rows.flip(1), signs(rows)),
    "triplet": lambda rows: nn.TripletMarginLoss(swap=True)(rows, rows.roll(1, 1), rows.flip(1)),
    "triplet with distance": lambda rows: nn.TripletMarginWithDistanceLoss(
        distance_function=nn.PairwiseDistance(p=2, eps=1e-3)
    )(rows, rows.roll(1, 1), rows.flip(1)),
    "ranking": lambda rows: nn.MarginRankingLoss(0.1)(rows[:, 0], rows[:, 1], signs(rows)),
    "multi margin": lambda rows: nn.MultiMarginLoss()(rows, classes(rows)),
    "multi label margin": lambda rows: nn.MultiLabelMarginLoss()(rows, _labels(rows)),
    "multi label soft margin": lambda rows: nn.MultiLabelSoftMarginLoss()(rows, (shares(rows) > 0.1).to(rows.dtype)),
    "soft margin": lambda rows: nn.SoftMarginLoss()(rows, signs(rows).unsqueeze(1).expand_as(rows)),
    "hinge": lambda rows: nn.HingeEmbeddingLoss()(rows, signs(rows).unsqueeze(1).expand_as(rows)),
}
