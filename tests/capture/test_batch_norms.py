"""What is told of batch norms at once is what torch's description of them says."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.capture.batch_norms import made_at_once

aten = torch.ops.aten
FORWARD = aten._native_batch_norm_legit_functional.default
BACKWARD = aten.native_batch_norm_backward.default


def vectors(count: int, channels: int = 5) -> list[torch.Tensor]:
    return [torch.ones(channels) for _ in range(count)]


def forward(shape: tuple[int, ...], *, training: bool = True, affine: bool = True) -> tuple[Any, ...]:
    weights = vectors(2) if affine else [None, None]
    return torch.randn(shape), *weights, *vectors(2), training, 0.1, 1e-5


def backward(shape: tuple[int, ...], mask: list[bool]) -> tuple[Any, ...]:
    return torch.randn(shape), torch.randn(shape), *vectors(5), True, 1e-5, mask


def described(made: Any) -> list[Any]:
    return [None if each is None else (each.shape, each.stride(), each.dtype, each.device) for each in made]


def both(operator: Any, args: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    with FakeTensorMode() as mode:
        faked = tuple(mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in args)
        at_once = made_at_once(mode, operator, faked, {})
        return at_once, described(operator(*faked))


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 7), (4, 5, 7, 6), (2, 5, 3, 3, 3)])
@pytest.mark.parametrize("affine", [True, False])
def test_results_are_those_of_torchs_description(shape: tuple[int, ...], affine: bool) -> None:
    at_once, expected = both(FORWARD, forward(shape, affine=affine))
    assert described(at_once) == expected
    at_once, expected = both(BACKWARD, backward(shape, [True, affine, affine]))
    assert described(at_once) == expected


def test_everything_else_goes_torchs_way() -> None:
    images = forward((4, 5, 7, 6))
    turned = images[0].to(memory_format=torch.channels_last)
    others = [forward((4, 5), training=False), (turned, *images[1:]), tuple(_halved(each) for each in images)]
    for args in others:
        at_once, _ = both(FORWARD, args)
        assert at_once is None


def _halved(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, torch.Tensor) else value
