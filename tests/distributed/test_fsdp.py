"""Planned FSDP2 against eager FSDP2 and against one process, on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_job import fast_job, run_ranks
from sharded_models import STEPS, Blocks, trained

from memfit.measure.optimizer import optimizer_memory


def check_peaks(found: dict[str, Any]) -> None:
    assert found["planned"] <= found["budget"]
    assert found["predicted"] <= found["budget"]
    assert abs(found["predicted"] / found["planned"] - 1) < 0.03
    assert abs(found["predicted_eager"] / found["eager"] - 1) < 0.03
    assert found["planned"] < 0.9 * found["eager"]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return fast_job()[1]


@pytest.fixture(scope="module")
def gpt2_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(tmp_path_factory.mktemp("gpt2"), ("gpt2",))


@pytest.mark.parametrize("rank", [0, 1])
def test_planned_units_give_the_gradients_of_eager_ones_within_their_budget(
    ranks: list[dict[str, Any]], rank: int
) -> None:
    """With mixed precision, offloaded shards and parameters that stay gathered."""
    found = ranks[rank]["policies"]
    assert found["bits"]
    check_peaks(found)


@pytest.mark.slow
def test_so_do_plainly_sharded_ones(gpt2_ranks: list[dict[str, Any]]) -> None:
    for found in (rank["gpt2"] for rank in gpt2_ranks):
        assert found["bits"]
        check_peaks(found)


@pytest.mark.slow
def test_gpt2_runs_in_half_of_its_activation_part(gpt2_ranks: list[dict[str, Any]]) -> None:
    for found in (rank["gpt2"] for rank in gpt2_ranks):
        half_bytes = found["persistent"] + (found["eager"] - found["persistent"]) / 2
        assert found["planned"] <= 1.01 * half_bytes  # the budget is of the rank that needs most


@pytest.mark.slow
def test_equal_units_are_planned_as_one_kind(gpt2_ranks: list[dict[str, Any]]) -> None:
    found = gpt2_ranks[0]["gpt2"]
    assert found["regions"] == ["transformer.h.0", "transformer.h.1", "transformer.ln_f"]
    assert found["kinds"] == 2


def test_all_ranks_have_one_plan(ranks: list[dict[str, Any]]) -> None:
    for case in ("policies",):
        assert ranks[0][case]["program"] == ranks[1][case]["program"]
        assert ranks[0][case]["predicted"] == ranks[1][case]["predicted"]


def test_twenty_planned_steps_end_where_one_process_ends(ranks: list[dict[str, Any]]) -> None:
    folder, _ = fast_job()
    assert all(rank["training"]["bits"] for rank in ranks)
    sharded = [torch.load(folder / f"trained{rank}.pt", weights_only=True) for rank in range(2)]
    torch.manual_seed(0)
    model = Blocks()
    trained(model, STEPS, lambda batch: batch)
    for one, *both in zip(model.parameters(), *sharded, strict=True):
        assert torch.equal(*both)
        assert float((one - both[0]).detach().abs().max()) <= 1e-6


def test_a_budget_that_cannot_be_met_is_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    messages = [rank["refusals"]["infeasible"] for rank in ranks]
    assert messages[0] == messages[1]
    assert "no plan of 1000 B" in messages[0][0]
    assert messages[0][1] > 1000


def test_ranks_with_other_shapes_are_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert all("ranks differ in the graphs" in rank["refusals"]["other shapes"] for rank in ranks)


def test_a_model_that_is_not_sharded_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert "call torch.distributed.fsdp.fully_shard" in ranks[0]["refusals"]["not sharded"]


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_of_them(ranks: list[dict[str, Any]]) -> None:
    first, last = (rank["together"]["stops"] for rank in ranks)
    assert "is not finite on 1 of 2 ranks" in first["heard"]
    assert "is inf" in last["heard"]
    for found in (first, last):
        assert found["unchanged"]
        assert found["without gradients"]
        assert found["moved on"]


def test_averages_over_ranks_go_in_messages_of_some_size(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["together"]["averaged"] for rank in ranks):
        assert found["right"]
        assert found["messages"] == [200, 140, 56, 192, 32]  # big ones, together, not contiguous, doubles


def test_a_sharded_model_stays_itself_and_can_be_given_back(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["training"]["is sharded"]
    assert ranks[0]["training"]["removed"]


def test_the_state_of_an_optimizer_is_that_of_the_shards(ranks: list[dict[str, Any]]) -> None:
    model = Blocks()
    whole = optimizer_memory("adamw", list(model.parameters())).state_bytes
    bytes_of = sum(each.nbytes for each in model.parameters())
    persistent = ranks[0]["policies"]["persistent"]
    assert persistent < 0.6 * (whole + 2 * bytes_of) + 8 * 128 * 32 * 4


@pytest.mark.slow
def test_resnet50_in_units_of_stages_runs_in_half_of_its_activation_part(tmp_path: Path) -> None:
    for found in (rank["stages:big"] for rank in run_ranks(tmp_path, ("stages:big",), seconds=900)):
        assert found["bits"]
        check_peaks(found)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    cases = ("gpt2", "policies", "grid", "training", "refusals", "together")
    ranks = run_ranks(tmp_path, cases, ranks=4, seconds=900)
    for found in ranks:
        for case in ("gpt2", "policies", "grid"):
            assert found[case]["bits"]
            check_peaks(found[case])
        assert found["training"]["bits"]
        assert found["together"]["goes on"]["bits"]
        assert found["together"]["averaged"]["right"]
        assert found["refusals"] == ranks[0]["refusals"]
    heard = [found["together"]["stops"]["heard"] for found in ranks]
    assert all("is not finite on 1 of 4 ranks" in each for each in heard[:3])
    assert "is inf" in heard[3]


@pytest.mark.slow
def test_bigger_models_within_their_budgets(tmp_path: Path) -> None:
    for found in run_ranks(tmp_path, ("resnet", "gpt2:big", "resnet:big"), seconds=900):
        for model in ("resnet", "gpt2:big", "resnet:big"):
            assert found[model]["bits"]
            check_peaks(found[model])
