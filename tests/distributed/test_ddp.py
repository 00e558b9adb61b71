"""A planned model inside DDP against the eager one inside DDP, and against one process with the whole batch."""

from pathlib import Path

import pytest
import torch
from ddp_job import SETTINGS, STEP_OPTIONS, mean_over_tokens, whole_batch
from ddp_models import make_model
from launching import run
from safetensors.torch import load_file

import memfit
from memfit.tensors import same_bits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    run("ddp_job.py", folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [load_file(folder / f"rank{rank}.safetensors") for rank in range(2)]


def part(found: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_and_buffers_equal_eager_ddp_bit_for_bit(setting: str, ranks: list[dict[str, torch.Tensor]]) -> None:
    for found in ranks:
        eager = part(found, f"{setting}/never/")
        assert len(eager) > 20
        for fitted in ("before", "after"):
            planned = part(found, f"{setting}/{fitted}/")
            if fitted == "after" and not planned:
                continue
            assert planned.keys() == eager.keys()
            assert all(same_bits(planned[name], eager[name]) for name in eager)


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_are_those_of_all_ranks(setting: str, ranks: list[dict[str, torch.Tensor]]) -> None:
    first, second = (part(found, f"{setting}/before/") for found in ranks)
    names = [name for name in first if not name.startswith("buffer.")]
    assert names
    assert all(same_bits(first[name], second[name]) for name in names)


def test_what_is_not_used_gets_no_gradient(ranks: list[dict[str, torch.Tensor]]) -> None:
    planned = part(ranks[0], "unused/before/")
    assert "0.embedding.weight" in planned
    assert "0.unused.weight" not in planned


@pytest.mark.parametrize("options", STEP_OPTIONS)
def test_twenty_steps_equal_one_process_with_the_whole_batch(
    options: str, ranks: list[dict[str, torch.Tensor]]
) -> None:
    model = make_model("words")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = memfit.Step(model, optimizer, mean_over_tokens, **STEP_OPTIONS[options])
    for number in range(20):
        step(whole_batch(number))
    step.flush()
    first, second = (part(found, f"step {options}/") for found in ranks)
    for name, value in model.state_dict().items():
        assert same_bits(first[name], second[name])
        assert float((first[name] - value).abs().max()) <= 1e-6


def test_all_ranks_stop_at_a_loss_that_is_not_finite_on_one(folder: Path) -> None:
    assert "is not finite on 1 of 2 ranks" in (folder / "rank0.txt").read_text()
    assert "the loss of step 1 is" in (folder / "rank1.txt").read_text()
