"""What a captured call returns."""

import torch

from memfit.execute.compiled import _without_views


def test_a_result_that_was_written_over_a_view_is_no_view_and_writes_into_it_are_noticed() -> None:
    def forward(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
        seen = arguments[0].view(2, 3).add_(1.0)
        return [seen, seen]

    result, kept = _without_views(forward, range(1))([torch.zeros(6)])
    assert kept._is_view()
    assert not result._is_view()
    assert result.data_ptr() == kept.data_ptr()
    before = kept._version
    result.mul_(2.0)
    assert kept._version > before
