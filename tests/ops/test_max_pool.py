from typing import Any

import pytest
import torch
from tensors_to_pack import HALF, LAYOUTS, assert_same_bits

from memfit.ops import max_pool
from memfit.ops.max_pool import backward_from_places, pack_indices, unpack_indices

aten = torch.ops.aten
Window = list[list[int]]

# kernel, stride, padding, dilation; height and width; ceil mode
CASES: dict[str, tuple[Window, tuple[int, int], bool]] = {
    "ResNet": ([[3, 3], [2, 2], [1, 1], [1, 1]], (17, 19), False),
    "VGG": ([[2, 2], [2, 2], [0, 0], [1, 1]], (16, 16), False),
    "overlapping": ([[3, 3], [1, 1], [1, 1], [1, 1]], (9, 8), False),
    "ceil mode": ([[3, 3], [2, 2], [0, 0], [1, 1]], (8, 8), True),
    "dilated": ([[3, 3], [2, 1], [1, 1], [2, 3]], (13, 14), False),
    "unequal": ([[2, 5], [3, 1], [1, 2], [1, 1]], (11, 12), True),
    "as big as a byte allows": ([[16, 16], [4, 4], [8, 8], [1, 1]], (33, 31), False),
    "one row": ([[1, 3], [1, 2], [0, 1], [1, 1]], (1, 40), False),
    "gaps": ([[2, 2], [5, 5], [0, 0], [1, 1]], (16, 17), False),
}


def pooled(image: torch.Tensor, window: Window, ceil_mode: bool) -> Any:
    return aten.max_pool2d_with_indices(image, *window, ceil_mode)


def places_of(image: torch.Tensor, window: Window, ceil_mode: bool) -> torch.Tensor:
    return pack_indices(pooled(image, window, ceil_mode)[1], image.shape[-2:], window)


def assert_exact(image: torch.Tensor, window: Window, ceil_mode: bool, gradient: torch.Tensor | None = None) -> None:
    output, indices = pooled(image, window, ceil_mode)
    places = pack_indices(indices, image.shape[-2:], window)
    assert places.dtype is torch.uint8
    assert_same_bits(unpack_indices(places, image.shape[-2:], window), indices)
    gradient = torch.randn_like(output) if gradient is None else gradient
    expected = aten.max_pool2d_with_indices_backward(gradient, image, *window, ceil_mode, indices)
    result = backward_from_places(gradient, places, image.shape, expected.stride(), window, ceil_mode)
    assert_same_bits(result, expected)


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
@pytest.mark.parametrize("case", CASES)
def test_indices_and_gradients_come_back_from_places(case: str, layout: str) -> None:
    window, size, ceil_mode = CASES[case]
    assert max_pool._can_pack(torch.empty(1, 1, *size), window)
    assert_exact(LAYOUTS[layout](torch.randn(2, 5, *size)), window, ceil_mode)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_half_precision_and_ties(layout: str, dtype: torch.dtype) -> None:
    window, size, ceil_mode = CASES["ResNet"]
    image = LAYOUTS[layout](torch.randint(-1, 2, (3, 4, *size)).to(dtype))
    assert_exact(image, window, ceil_mode)


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf, 0.0, -0.0])
def test_images_of_one_value_and_special_values_among_others(value: float, layout: str) -> None:
    window, size, ceil_mode = CASES["ResNet"]
    assert_exact(LAYOUTS[layout](torch.full((2, 3, *size), value)), window, ceil_mode)
    mixed = torch.randn(2, 3, *size)
    mixed[torch.rand(mixed.shape) > 0.6] = value
    assert_exact(LAYOUTS[layout](mixed), window, ceil_mode)


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_many_pieces_give_the_same(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_pool, "_PIECE", 300)
    window, size, ceil_mode = CASES["ResNet"]
    assert_exact(LAYOUTS[layout](torch.randn(5, 7, *size)), window, ceil_mode)


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_a_gradient_of_another_layout(layout: str) -> None:
    window, size, ceil_mode = CASES["VGG"]
    image = LAYOUTS[layout](torch.randn(2, 3, *size))
    for gradient in (torch.randn(2, 3, 1, 1).expand(2, 3, 8, 8), torch.randn(8, 8, 3, 2).permute(3, 2, 1, 0)):
        assert_exact(image, window, ceil_mode, gradient)


def test_one_image_without_a_batch() -> None:
    window, size, ceil_mode = CASES["ResNet"]
    assert_exact(torch.randn(3, *size), window, ceil_mode)


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_one_channel_and_no_image(layout: str) -> None:
    window, size, ceil_mode = CASES["ResNet"]
    assert_exact(LAYOUTS[layout](torch.randn(3, 1, *size)), window, ceil_mode)
    assert_exact(LAYOUTS[layout](torch.randn(0, 2, *size)), window, ceil_mode)


def test_made_up_places_stay_inside_the_image() -> None:
    window, size, _ = CASES["ResNet"]
    for value in (0, 8, 255):
        places = torch.full((1, 1, 9, 10), value, dtype=torch.uint8)
        indices = unpack_indices(places, size, window)
        assert indices.min() >= 0
        assert indices.max() < size[0] * size[1]


@pytest.mark.parametrize(
    ("size", "window"),
    [
        ((32, 32), [[17, 16], [2, 2], [0, 0], [1, 1]]),
        ((2, 2), [[3, 3], [2, 2], [1, 1], [1, 1]]),
        ((5000, 5000), [[2, 2], [2, 2], [0, 0], [1, 1]]),
    ],
    ids=["more than 256 places", "a window wider than the image", "too many indices for float32"],
)
def test_what_does_not_fit_is_not_offered(size: tuple[int, int], window: Window) -> None:
    assert not max_pool._can_pack(torch.empty(1, 1, *size, device="meta"), window)


@pytest.mark.parametrize(
    ("given", "window"),
    [
        ([[2, 2], [], [0, 0], [1, 1]], [[2, 2], [2, 2], [0, 0], [1, 1]]),
        ([[3], [2], [1], [1]], [[3, 3], [2, 2], [1, 1], [1, 1]]),
    ],
    ids=["no stride", "one number for both"],
)
def test_windows_are_read_as_torch_reads_them(given: Window, window: Window) -> None:
    assert max_pool._pairs(given) == window
