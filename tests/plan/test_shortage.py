"""Refusals of budgets say what is known, and what is a bound."""

import pytest

from memfit.shortage import Shortage

MIB = 2**20


@pytest.mark.parametrize(
    ("is_bound", "words"),
    [
        (False, "aten.convolution.default in conv needs 3.00 MiB on top of parameters"),
        (True, "which does not fit the budget to be run here and seen, may need up to 3.00 MiB on top of parameters"),
    ],
)
def test_a_workspace_that_was_not_seen_is_called_a_bound(is_bound: bool, words: str) -> None:
    shortage = Shortage(
        limit_bytes=2 * MIB,
        smallest_bytes=4 * MIB,
        slowdown=0.0,
        always={"parameters": MIB},
        at_end={},
        floor_bytes=4 * MIB,
        operation="aten.convolution.default in conv",
        on_top_bytes=3 * MIB,
        is_bound=is_bound,
    )
    assert words in str(shortage.error())
