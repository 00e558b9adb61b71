"""Vectors that are lists of tensors, one per parameter."""

from collections.abc import Iterator, Sequence

import torch

Vector = list[torch.Tensor]


def dot(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> torch.Tensor:
    """Inner product, as a tensor so that nobody waits for the device."""
    return torch.stack([torch.sum(a * b) for a, b in zip(left, right, strict=True)]).sum()


def norm(vector: Sequence[torch.Tensor]) -> torch.Tensor:
    """Euclidean length, each part in fp32 or better."""
    lengths = torch.stack([torch.linalg.vector_norm(part.detach()) for part in vector])
    whole: torch.Tensor = torch.linalg.vector_norm(lengths)
    return whole


def add_scaled(
    vector: Sequence[torch.Tensor], other: Sequence[torch.Tensor], scale: float | torch.Tensor = 1.0
) -> Vector:
    """`vector + scale * other`, as a new vector."""
    return [a + b * scale for a, b in zip(vector, other, strict=True)]


def flat(vector: Sequence[torch.Tensor]) -> torch.Tensor:
    """All parts end to end."""
    return torch.cat([part.reshape(-1) for part in vector])


def unflat(line: torch.Tensor, like: Sequence[torch.Tensor]) -> Vector:
    """The parts of a flat vector, shaped as those of another."""
    return [part.view_as(shape) for part, shape in zip(_cut(line, like), like, strict=True)]


def _cut(line: torch.Tensor, like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    yield from line.split([part.numel() for part in like])


def or_zeros(gradients: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> Vector:
    """Gradients with zeros where there is none."""
    return [torch.zeros_like(b) if a is None else a for a, b in zip(gradients, like, strict=True)]


def summed(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """The sum, where None stands for zero."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
