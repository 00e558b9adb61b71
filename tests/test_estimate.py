"""What an estimate tells, and what is refused."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import convolutions, cross_entropy, half_frozen, images, tied
from torch import nn

import memfit
from memfit.errors import InvalidBudget, InvalidInput, InvalidModel, InvalidSample, MemfitError
from memfit.ir import Kind


@pytest.fixture(scope="module")
def estimate() -> memfit.Estimate:
    torch.manual_seed(0)
    return memfit.estimate(convolutions(), images(), optimizer="adamw", loss=cross_entropy)


def test_the_parts_by_kind_add_up_to_the_peak(estimate: memfit.Estimate) -> None:
    assert sum(estimate.by_kind().values()) == estimate.peak_bytes
    assert all(size > 0 for size in estimate.by_kind().values())


def test_the_parts_by_kind_come_biggest_first(estimate: memfit.Estimate) -> None:
    assert list(estimate.by_kind().values()) == sorted(estimate.by_kind().values(), reverse=True)


def test_the_resident_kinds_have_their_real_sizes(estimate: memfit.Estimate) -> None:
    model, batch = convolutions(), images()
    kinds = estimate.by_kind()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert kinds[Kind.PARAMETER] == weights
    assert kinds[Kind.BUFFER] == sum(buffer.nbytes for buffer in model.buffers())
    assert kinds[Kind.BATCH] == sum(tensor.nbytes for tensor in batch)
    assert kinds[Kind.OPTIMIZER] == 2 * weights + 4 * len(list(model.parameters()))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_parts_by_module_add_up_to_the_peak(estimate: memfit.Estimate, depth: int) -> None:
    assert sum(estimate.by_module(depth).values()) == estimate.peak_bytes


def test_modules_are_named_as_in_the_model(estimate: memfit.Estimate) -> None:
    names = {name for name, _ in convolutions().named_modules()}
    assert set(estimate.by_module(5)) <= names
    assert {"0", "1", "3"} <= set(estimate.by_module())


def test_the_biggest_values_are_live_at_the_peak_and_sorted(estimate: memfit.Estimate) -> None:
    sizes = [storage.size_bytes for storage in estimate.biggest(5)]
    assert len(sizes) == 5
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) <= estimate.peak_bytes


def test_a_step_fits_what_is_at_least_its_peak(estimate: memfit.Estimate) -> None:
    assert estimate.fits(estimate.peak_bytes)
    assert not estimate.fits(estimate.peak_bytes - 1)
    assert estimate.fits("T4")
    assert estimate.fits("1GiB")
    with pytest.raises(InvalidBudget):
        estimate.fits("T5")


def test_an_estimate_is_written_as_json(estimate: memfit.Estimate) -> None:
    content = json.loads(estimate.to_json())
    assert content == estimate.to_dict() | {"biggest": content["biggest"]}
    assert content["format"] == "memfit.estimate"
    assert content["peak_bytes"] == estimate.peak_bytes
    assert sum(content["by_kind"].values()) == sum(content["by_module"].values()) == estimate.peak_bytes
    assert content["biggest"][0]["size_bytes"] == estimate.biggest(1)[0].size_bytes
    assert content["peak_phase"] == estimate.peak_phase


def test_an_estimate_tells_itself_in_one_line(estimate: memfit.Estimate) -> None:
    text = str(estimate)
    assert text.startswith("Sequential on cpu, a training step with adamw: peak ")
    assert "\n" not in text


def test_an_estimate_made_here_has_nothing_to_note(estimate: memfit.Estimate) -> None:
    assert estimate.notes == ()
    assert estimate.workspaces_measured


def test_trained_and_frozen_parameters_are_counted_apart() -> None:
    model = half_frozen()
    counts = {each.trainable: each for each in memfit.estimate(model, images()[0], measure=False).parameters}
    frozen = [*model[0].parameters(), *model[1].parameters()]
    assert counts[False].count == sum(weight.numel() for weight in frozen)
    assert counts[False].size_bytes == sum(weight.nbytes for weight in frozen)
    assert counts[True].count + counts[False].count == sum(weight.numel() for weight in model.parameters())


def test_parameters_are_counted_by_dtype_and_tied_ones_once() -> None:
    model = nn.Sequential(tied(), nn.Linear(256, 1).bfloat16())
    model[1].requires_grad_(False)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner[1](self.inner[0](x).bfloat16())

    counts = {each.dtype: each for each in memfit.estimate(Mixed(), torch.randn(4, 256), measure=False).parameters}
    assert counts["float32"].count == 256 * 256 + 3 * 256
    assert (counts["bfloat16"].count, counts["bfloat16"].size_bytes) == (257, 514)


def test_a_device_that_is_not_here_is_noted() -> None:
    there = memfit.estimate(convolutions(), images()[0], device="A100-40GB")
    assert there.device == "A100-40GB"
    assert any("counted for A100-40GB" in note for note in there.notes)
    assert any("not measured" in note for note in there.notes)
    assert not there.workspaces_measured


def test_a_device_rounds_every_storage_up() -> None:
    model, x = convolutions(), images()[0]
    here = memfit.estimate(model, x, measure=False)
    there = memfit.estimate(model, x, device="T4")
    assert there.peak_bytes % 512 == 0
    assert there.peak_bytes > here.peak_bytes
    assert sum(there.by_kind().values()) == sum(there.by_module().values()) == there.peak_bytes


def test_an_unknown_device_is_refused_before_anything_is_captured() -> None:
    with pytest.raises(InvalidBudget, match="B300"):
        memfit.estimate(nn.Linear(4, 4), "no sample at all", device="B300")


def test_without_measuring_workspaces_are_not_counted_and_that_is_noted() -> None:
    model, x = convolutions(), images()[0]
    rough, exact = memfit.estimate(model, x, measure=False), memfit.estimate(model, x)
    assert rough.peak_bytes < exact.peak_bytes
    assert Kind.WORKSPACE not in rough.by_kind()
    assert any("workspaces" in note for note in rough.notes)


def test_a_model_without_weights_is_estimated_like_the_real_one() -> None:
    with memfit.without_weights():
        fake, x = convolutions(), torch.empty(8, 3, 32, 32)
    real = memfit.estimate(convolutions(), images()[0], optimizer="adamw")
    assert memfit.estimate(fake, x, optimizer="adamw").peak_bytes == real.peak_bytes


def test_what_no_machine_here_could_hold_is_estimated() -> None:
    with memfit.without_weights():
        model, x = nn.Sequential(nn.Linear(200_000, 200_000), nn.ReLU()), torch.empty(8, 200_000)
    peak_bytes = memfit.estimate(model, x, optimizer="adamw").peak_bytes
    assert peak_bytes > 4 * 200_000 * 200_000 * 4


def test_the_model_is_not_run_and_not_changed() -> None:
    model, batch = convolutions(), images()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    memfit.estimate(model, batch, optimizer="adamw", loss=cross_entropy)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


def test_progress_is_told_until_all_is_measured() -> None:
    told: list[tuple[int, int]] = []
    memfit.estimate(nn.Linear(11, 13), torch.randn(7, 11), progress=lambda done, total: told.append((done, total)))
    assert told
    assert told[-1][0] == told[-1][1]


def linear() -> nn.Module:
    return nn.Linear(4, 4)


X = torch.zeros(2, 4)

BAD_INPUT: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], type[InvalidInput]]] = {
    "a sample on another device": (linear, X.to("meta"), {}, InvalidSample),
    "a keyword the forward does not take": (linear, {"inputs": X}, {}, InvalidSample),
    "too many arguments": (linear, (X, X), {}, InvalidSample),
    "no trainable parameter": (lambda: linear().requires_grad_(False), X, {}, InvalidModel),
    "an output without gradient": (lambda: nn.Sequential(linear(), Detach()), X, {}, InvalidModel),
    "a model on the meta device": (lambda: nn.Linear(4, 4, device="meta"), X.to("meta"), {}, InvalidModel),
    "an unknown optimizer": (linear, X, {"optimizer": "adamx"}, InvalidInput),
    "an optimizer of sparse gradients": (linear, X, {"optimizer": "sparseadam"}, InvalidInput),
    "an unknown device": (linear, X, {"device": "abacus"}, InvalidBudget),
    "an ambiguous device": (linear, X, {"device": "A100"}, InvalidBudget),
}


class Detach(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


@pytest.mark.parametrize(("make", "sample", "options", "error"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_refused_in_one_paragraph(
    make: Callable[[], nn.Module], sample: Any, options: dict[str, Any], error: type[InvalidInput]
) -> None:
    with pytest.raises(error) as caught:
        memfit.estimate(make(), sample, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) > 40


def test_a_model_that_returns_its_parameter_is_estimated() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight

    assert memfit.estimate(Constant(), X).peak_bytes >= 40


@pytest.mark.parametrize("options", [{}, {"loss": lambda model, batch: model(batch)}], ids=["model", "loss"])
def test_a_loss_beside_the_model_keeps_the_paths_of_the_model(options: dict[str, Any]) -> None:
    graph = memfit.estimate(nn.Sequential(linear()), X, measure=False, **options).graph
    assert [graph.storages[index].name for index in graph.resident][:2] == ["0.weight", "0.bias"]
    assert graph.operations[0].module == "0"


def test_a_loss_that_fails_is_a_capture_that_fails() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch) @ torch.zeros(3)

    with pytest.raises(MemfitError, match="could not be captured") as caught:
        memfit.estimate(linear(), X, loss=loss)
    assert "\n" not in str(caught.value)


def test_on_a_cuda_device_dropout_keeps_one_byte_a_value() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    masks = [
        {storage.dtype for storage in memfit.estimate(model, torch.randn(8, 64), device=device).graph.storages}
        for device in (None, "A100-40GB")
    ]
    assert "bool" not in masks[0]
    assert "bool" in masks[1]


def test_the_peak_of_the_process_is_shown_where_it_is_known(estimate: memfit.Estimate) -> None:
    assert estimate.process_peak_bytes is None
    assert "process" not in str(estimate)
    with_process = dataclasses.replace(estimate, process_peak_bytes=3 * 2**30)
    assert "3.00 GiB of the process" in str(with_process)
    assert with_process.to_dict()["process_peak_bytes"] == 3 * 2**30


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
def test_a_compiled_model_is_said_to_be_counted_as_it_runs_without():
    model, batch = nn.Linear(4, 4), torch.randn(2, 4)
    plain, compiled = (memfit.estimate(each, batch, measure=False) for each in (model, torch.compile(model)))
    assert compiled.peak_bytes == plain.peak_bytes
    assert [each for each in compiled.notes if "torch.compile" in each]
    assert not [each for each in plain.notes if "torch.compile" in each]
