import copy
import gc
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensors_to_pack import LAYOUTS, assert_same_bits, with_special_values
from torch import nn

import memfit
from memfit.errors import ExecutionError
from memfit.measure.peak import measure_peak
from memfit.ops import offload
from memfit.ops.offload import bring_back, send_out


@pytest.fixture(autouse=True)
def _own_file() -> Iterator[None]:
    before = list(offload._files)
    offload._files.clear()
    yield
    offload._files[:] = before


def layout_of(values: torch.Tensor) -> tuple[Any, ...]:
    return list(values.shape), list(values.stride()), values.dtype, values.device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_come_back_as_they_went(layout: str, dtype: torch.dtype) -> None:
    values = LAYOUTS[layout](torch.randn(3, 8, 7, 11).to(dtype))
    if dtype is torch.float32:
        values.as_strided((12,), (1,)).copy_(with_special_values(torch.randn(12)))
    ticket = send_out(values)
    assert_same_bits(bring_back(ticket, *layout_of(values)), values)
    assert_same_bits(bring_back(ticket, *layout_of(values)), values)  # as often as it is asked for


def test_a_place_is_used_again_when_its_ticket_is_gone() -> None:
    values = torch.randn(1000)
    for _ in range(5):
        ticket = send_out(values)
        other = send_out(-values)
        assert_same_bits(bring_back(ticket, *layout_of(values)), values)
        assert_same_bits(bring_back(other, *layout_of(values)), -values)
        del ticket, other
    assert offload._file()._end_bytes == 2 * 4096
    assert not offload._file()._places


class _Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(send_out(values))
        return values * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (ticket,) = ctx.saved_tensors
        return bring_back(ticket, (64,), (1,), torch.float32, torch.device("cpu"))


def test_a_ticket_is_good_as_long_as_autograd_holds_its_memory() -> None:
    """Under hooks for saved tensors that is by another tensor than the one that was made."""
    values = torch.randn(64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach(), lambda saved: saved):
        output = _Keeps.apply(values)
    gc.collect()
    output.sum().backward()
    assert torch.equal(values.grad, values)


def test_nothing_but_a_number_stays_in_memory() -> None:
    values = torch.randn(2**20)
    kept: list[torch.Tensor] = []
    measured = measure_peak(lambda: kept.append(send_out(values)), resident=())
    assert measured.peak_bytes <= 64


def test_a_directory_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/nowhere/at/all")
    with pytest.raises(ExecutionError, match=r"/nowhere/at/all.*TMPDIR"):
        send_out(torch.randn(4))


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ExecutionError, match=r"no room for.*No space left"):
        send_out(torch.randn(4))


def perceptron() -> nn.Sequential:
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh(), nn.Dropout(0.1))]
    return nn.Sequential(*layers)


def test_a_planned_step_sends_out_and_equals_the_eager_one() -> None:
    eager, batch = perceptron(), torch.randn(512, 256)
    plan = memfit.plan(eager, batch, budget="smallest", allow=("offload",))
    assert any("offload" in str(fate) for fate in plan.fates)
    assert plan.peak_bytes < 0.75 * plan.unplanned_peak_bytes
    assert memfit.check(eager, plan, batch).exact
    planned = memfit.apply(plan, copy.deepcopy(eager))
    output = planned(batch)
    assert offload._file()._places
    output.square().mean().backward()
    del output
    gc.collect()
    assert not offload._file()._places  # all tickets are gone


def test_the_peak_is_what_was_predicted() -> None:
    eager, batch = perceptron(), torch.randn(512, 256)
    plan = memfit.plan(eager, batch, budget="smallest", allow=("offload", "recompute"))
    profile = memfit.profile(eager, plan, batch)
    assert profile.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)
