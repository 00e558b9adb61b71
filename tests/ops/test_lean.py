import pytest
import torch

from memfit.ops.lean import SMALLEST_BYTES, in_memory_order, is_dense, is_worth_it, pieces, same_layout


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.empty(2, 3), True),
        (torch.empty(2, 3).t(), True),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.empty(()), True),
        (torch.empty(2, 1, 3).permute(1, 0, 2), True),
        (torch.empty(2, 6)[:, ::2], False),
        (torch.empty(2, 6)[:, :3], False),
        (torch.empty(1, 3).expand(2, 3), False),
    ],
    ids=["contiguous", "transposed", "channels-last", "scalar", "ones", "every second", "slice", "expanded"],
)
def test_dense_means_without_gaps_and_overlaps(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor) == dense


def test_only_whole_and_big_values_are_worth_it() -> None:
    length = SMALLEST_BYTES // 4
    assert is_worth_it(torch.empty(length))
    assert not is_worth_it(torch.empty(length - 1))
    assert not is_worth_it(torch.empty(2 * length)[:length])
    assert not is_worth_it(torch.empty(1).expand(length))


def test_memory_order_is_the_order_of_the_storage() -> None:
    tensor = torch.arange(6).view(2, 3).t()
    flat = in_memory_order(tensor)
    assert flat.tolist() == list(range(6))
    flat[0] = 7
    assert tensor[0, 0] == 7


def test_layouts_are_shape_strides_and_dtype() -> None:
    tensor = torch.empty(3, 3)
    assert same_layout(tensor, torch.empty(3, 3))
    assert not same_layout(tensor, tensor.t())
    assert not same_layout(tensor, tensor.double())


def test_pieces_cover_everything_once() -> None:
    assert [(piece.start, piece.stop) for piece in pieces(10, 4)] == [(0, 4), (4, 8), (8, 10)]
    assert list(pieces(0, 4)) == []
