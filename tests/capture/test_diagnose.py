"""A failed capture names the module, the line, the reason and what to do, in one paragraph."""

from typing import Any

import pytest
import torch
from capturing import captured
from torch import nn

from memfit.errors import CaptureError


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.linear(x)
        return found if found.sum() > 0 else -found


class Selects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[x[:, 0] > 0])


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad luck\nand a second line")


class Nested(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Identity(), inner])

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def failure(model: nn.Module, sample: Any = None) -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        captured(model, torch.randn(2, 4) if sample is None else sample)
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_module_is_named() -> None:
    error = failure(Nested(Branches()))
    assert error.module == "blocks.1"
    assert "Nested could not be captured: in module 'blocks.1' at " in str(error)


def test_the_line_is_named() -> None:
    error = failure(Nested(Branches()))
    line = Branches.forward.__code__.co_firstlineno + 2
    assert error.source == f"capture/test_diagnose.py:{line}"
    assert error.source in str(error)


def test_the_model_itself_is_its_top_level() -> None:
    error = failure(Branches())
    assert error.module == ""
    assert "at its top level" in str(error)


def test_a_branch_on_values_is_answered_with_a_way_out() -> None:
    assert "asks for the value of a tensor" in str(failure(Branches()))
    assert "torch.where" in str(failure(Branches()))


def test_a_size_that_depends_on_values_is_answered_with_a_way_out() -> None:
    error = failure(Selects())
    assert "the size of a result depends on values" in str(error)
    assert "a mask" in str(error)


def test_an_error_of_the_model_is_passed_on() -> None:
    error = failure(Nested(Raises()))
    assert error.module == "blocks.1"
    assert "ValueError: bad luck" in str(error)
    assert isinstance(error.__cause__, ValueError)


def test_a_sample_of_the_wrong_shape_names_the_module_it_does_not_fit() -> None:
    error = failure(Nested(Branches()), torch.randn(2, 5))
    assert error.module == "first"
    assert "check that the model runs on this sample by itself" in str(error)


class Sampling(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(rows, rows.square() + 1, validate_args=True).rsample()


def test_a_distribution_that_checks_its_arguments_is_named_with_the_way_to_switch_that_off() -> None:
    assert "validate_args=False" in str(failure(Nested(Sampling())))
