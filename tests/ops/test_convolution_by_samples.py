from typing import Any

import pytest
import torch
from torch import nn

from memfit.capture.alternatives import extend
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.measure.peak import measure_peak
from memfit.ops.convolution_by_samples import backward_by_samples, backward_by_samples_

aten = torch.ops.aten


def arguments(
    *, samples: int = 11, groups: int = 1, stride: int = 1, bias: bool = True, layout: Any = torch.contiguous_format
) -> Any:
    values = torch.randn(samples, 8, 12, 12, dtype=torch.float64).contiguous(memory_format=layout)
    weight = torch.randn(8, 8 // groups, 3, 3, dtype=torch.float64)
    gradient = torch.randn(samples, 8, 12 // stride, 12 // stride, dtype=torch.float64).contiguous(memory_format=layout)
    settings = [[8], [stride, stride], [1, 1], [1, 1], False, [0, 0], groups]
    return gradient, values, weight, *settings, [True, True, bias]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_the_gradients_are_those_of_the_operator(groups: int, stride: int, bias: bool, layout: Any) -> None:
    args = arguments(groups=groups, stride=stride, bias=bias, layout=layout)
    expected = aten.convolution_backward(*args)
    for made, own in zip(backward_by_samples(*args), expected, strict=True):
        assert (made is None) == (own is None)
        if own is not None:
            torch.testing.assert_close(made, own, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("samples", [2, 3, 8, 17])
def test_a_gradient_of_the_same_shape_is_overwritten(samples: int) -> None:
    args = arguments(samples=samples)
    expected = backward_by_samples(*args)
    gradient = args[0].clone()
    made = backward_by_samples_(gradient, *args[1:])
    assert made[0].data_ptr() == gradient.data_ptr()
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


def test_short_floats_are_summed_in_longer_ones() -> None:
    args = arguments(samples=64)
    expected = aten.convolution_backward(*args)[1]
    short = [each.bfloat16() if isinstance(each, torch.Tensor) else each for each in args]
    own, lean = (each[1].double() for each in (aten.convolution_backward(*short), backward_by_samples(*short)))
    assert lean.dtype == own.dtype
    assert (lean - expected).norm() < 1.2 * (own - expected).norm()


def test_less_is_held_than_by_the_operator() -> None:
    gradient, values = torch.randn(2, 16, 16, 64, 64)
    others = (torch.randn(16, 16, 3, 3), [16], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    own = measure_peak(lambda: aten.convolution_backward(gradient, values, *others), resident=())
    lean = measure_peak(lambda: backward_by_samples_(gradient, values, *others), resident=())
    assert lean.peak_bytes < own.peak_bytes / 2


@pytest.mark.parametrize(("techniques", "expected"), [(("inductor",), 1), (("lean",), 0)])
def test_it_goes_with_compiled_kernels_and_where_the_input_wants_a_gradient(
    techniques: tuple[str, ...], expected: int
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
    with traced(model, Sample.of(torch.randn(4, 3, 16, 16))) as joint:
        extend(joint, techniques)
    calls = [node for node in joint.graph_module.graph.nodes if node.target is backward_by_samples]
    assert len(calls) == expected
