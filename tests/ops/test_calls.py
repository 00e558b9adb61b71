from typing import Any

import pytest
import torch

from memfit.ops.calls import faithful_call, quick_call

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


MATRIX = torch.randn(4, 6)
QUICK = [
    (aten.t.default, (MATRIX,), {}),
    (aten.view.default, (MATRIX, [24]), {}),
    (aten.add.Tensor, (MATRIX, MATRIX), {"alpha": 3}),
    (aten.mm.default, (MATRIX, MATRIX.t()), {}),
    (aten.sum.dim_IntList, (MATRIX, [0], True), {}),
    (aten.clone.default, (MATRIX.t(),), {"memory_format": torch.contiguous_format}),
    (aten.mul.Tensor, (MATRIX, 2.0), {}),
    (aten.native_layer_norm.default, (MATRIX, [6], None, None, 1e-5), {}),
    (aten.cat.default, ([MATRIX, MATRIX], 1), {}),
    (aten.relu_.default, (MATRIX.clone(),), {}),
]


@pytest.mark.parametrize(("target", "args", "kwargs"), QUICK, ids=lambda each: str(each) if callable(each) else "")
def test_the_quick_way_calls_the_same_operator(target: Any, args: Any, kwargs: Any) -> None:
    function = quick_call(target, args, kwargs)
    assert function is not faithful_call(target)
    found, expected = function(*args, **kwargs), target(*args, **kwargs)
    results = [[each] if isinstance(each, torch.Tensor) else each for each in (found, expected)]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.mul.Tensor, (MATRIX, torch.tensor(2.0))),  # might pass for a number
        (aten.add.Scalar, (MATRIX, 2.0)),  # ends at the one for tensors
        (aten._to_copy.default, (MATRIX,)),  # has no function of its own
        (aten.mkldnn_rnn_layer.default, ()),
    ],
    ids=lambda each: str(each) if callable(each) else "",
)
def test_what_may_end_elsewhere_takes_the_sure_way(target: Any, args: Any) -> None:
    if args:
        assert quick_call(target, args, {}) is faithful_call(target)
    else:
        assert quick_call(target, args, {}) is not target


def test_every_overload_of_a_name_is_told_from_the_others() -> None:
    for target, other in ((aten.add.Tensor, MATRIX), (aten.add.Scalar, 2.0)):
        function = quick_call(target, (MATRIX, other), {})
        assert torch.equal(function(MATRIX, other), target(MATRIX, other))


def test_a_function_of_pythons_own_is_called_as_it_is() -> None:
    assert quick_call(len, ([],), {}) is len
