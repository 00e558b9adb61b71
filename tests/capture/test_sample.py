import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from memfit.capture.sample import Sample, check_sample
from memfit.errors import InvalidModel, InvalidSample

X = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("written", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X, 3), (X, 3), {}),
        ([X, X], (X, X), {}),
        ({"input": X}, (), {"input": X}),
        (Sample((X,), {"flag": True}), (X,), {"flag": True}),
        ((), (), {}),
        (3, (3,), {}),
    ],
    ids=["tensor", "tuple", "list", "dict", "sample", "nothing", "number"],
)
def test_a_sample_is_read_as_users_write_it(written: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    sample = Sample.of(written)
    assert (sample.args, dict(sample.kwargs)) == (args, kwargs)


def test_tensors_are_found_at_any_depth() -> None:
    sample = Sample(([X, {"a": X}], 3), {"k": (X,)})
    assert len(list(sample.tensors())) == 3


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    name: str = "record"
    more: Any = None


def test_tensors_are_found_in_records() -> None:
    assert [id(each) for each in Sample((Record(X, more=[Record(X + 1), None]), Record), {}).tensors()][:1] == [id(X)]
    assert len(Sample((Record(X, more=[Record(X + 1), None]), Record), {}).tensors()) == 2


def refusal(model: nn.Module, sample: Any) -> str:
    with pytest.raises((InvalidSample, InvalidModel)) as caught:
        check_sample(model, Sample.of(sample))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("sample", [{"inputs": X}, (X, X), (), {"input": X, "flag": 1}])
def test_arguments_the_forward_does_not_take_are_refused(sample: Any) -> None:
    message = refusal(nn.Linear(4, 4), sample)
    assert "does not fit Linear.forward(input" in message
    assert "positional arguments as a tuple" in message


def test_a_sample_on_another_device_is_refused_with_both_devices() -> None:
    message = refusal(nn.Linear(4, 4), X.to("meta"))
    assert "the sample is on meta and the model on cpu" in message


def test_a_model_on_the_meta_device_is_refused() -> None:
    model = nn.Linear(4, 4, device="meta")
    with pytest.raises(InvalidModel, match="on the meta device"):
        check_sample(model, Sample.of(X.to("meta")))


def test_the_way_out_of_the_meta_device_is_named() -> None:
    assert "memfit.without_weights()" in refusal(nn.Linear(4, 4, device="meta"), X.to("meta"))


def test_a_real_sample_for_a_model_on_the_meta_device_is_refused() -> None:
    assert "the model on meta" in refusal(nn.Linear(4, 4, device="meta"), X)


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(InvalidModel, match=r"no parameter that requires a gradient.*requires_grad_\(True\)"):
        check_sample(nn.Linear(4, 4).requires_grad_(False), Sample.of(X))


def test_a_frozen_model_is_taken_when_its_input_requires_a_gradient() -> None:
    check_sample(nn.Linear(4, 4).requires_grad_(False), Sample.of(torch.zeros(2, 4, requires_grad=True)))
