from typing import Any

import pytest
import torch

from memfit.ops.calls import faithful_call

aten = torch.ops.aten


@pytest.mark.parametrize("target", [aten.relu.default, aten.neg.default], ids=str)
def test_a_call_computes_what_the_operator_computes(target: Any) -> None:
    value = torch.randn(5)
    assert torch.equal(faithful_call(target)(value), target(value))


def test_the_recurrent_layer_makes_its_workspace_also_without_grad_mode() -> None:
    weights = (torch.randn(32, 8), torch.randn(32, 8), torch.randn(32), torch.randn(32))
    states = (torch.zeros(2, 8), torch.zeros(2, 8))
    flags = (False, [], 2, 8, 1, True, False, False, True)
    args = (torch.randn(5, 2, 8), *weights, *states, *flags)
    with torch.no_grad():
        layer = faithful_call(aten.mkldnn_rnn_layer.default)(*args)
        bare = aten.mkldnn_rnn_layer.default(*args)
        assert not torch.is_grad_enabled()
    assert bare[3] is None
    assert layer[3].numel() > 0
    for one, other in zip(layer[:3], bare[:3], strict=True):
        torch.testing.assert_close(one, other)
    assert not any(result.requires_grad for result in layer)
