"""All ranks run by one plan, or all of them say why not."""

import json
from typing import Any

import pytest
import torch
from ddp_models import make_model
from launching import run
from torch import nn

import memfit
from memfit import distributed

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("agree")
    run("agree_job.py", folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", ["agreed", "regions", "fitted", "unplanned", "slow"])
def test_all_ranks_have_one_plan(case: str, ranks: Found) -> None:
    assert "error" not in ranks[0][case], ranks[0][case]
    assert ranks[0][case] == ranks[1][case]


def test_a_plan_counts_the_optimizer_and_the_buckets(ranks: Found) -> None:
    parameter_bytes = 4 * (8 * 32 + 32 + 32 * 8 + 8)
    counters = 4 * 4  # of AdamW, one a parameter
    assert ranks[0]["agreed"]["value"]["state_bytes"] == 3 * parameter_bytes + counters
    assert ranks[0]["fitted"]["value"]["optimizer"] == "adamw and the buckets of DDP"


def test_a_model_inside_ddp_is_fitted_inside(ranks: Found) -> None:
    assert ranks[0]["fitted"]["value"]["same"]


def test_what_cannot_be_captured_whole_is_planned_by_regions(ranks: Found) -> None:
    assert ranks[1]["regions"]["value"]["regions"]


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("shape", "RankError", ["rank 1", "sample", "float32[5, 8]", "float32[4, 8]"]),
        ("graph", "RankError", ["rank 1", "graph"]),
        ("options", "RankError", ["rank 1", "options", "0.9", "0.8"]),
        ("capture", "RankError", ["rank 1", "could not capture", "this rank has a broken part"]),
        ("torch", "RankError", ["rank 1", "version of torch", "9.9.9"]),
        ("refused", "RankError", ["rank 1", "runs through memfit already"]),
        ("budget", "InfeasibleBudget", ["no plan of 1.00 KiB"]),
    ],
)
def test_all_ranks_raise_the_same(case: str, error: str, words: list[str], ranks: Found) -> None:
    for found in ranks:
        assert found[case]["error"] == error
        assert found[case]["message"] == ranks[0][case]["message"]
        assert all(word in found[case]["message"] for word in words), found[case]["message"]


def test_a_budget_that_cannot_be_met_says_the_smallest_on_all_ranks(ranks: Found) -> None:
    assert ranks[0]["budget"]["fields"] == ranks[1]["budget"]["fields"]
    assert ranks[1]["budget"]["fields"]["smallest_bytes"] > 1024


def test_what_fails_on_one_rank_is_applied_on_none(ranks: Found) -> None:
    assert ranks[0]["refused"]["left as it was"]
    assert ranks[1]["refused"]["left as it was"]


def test_a_rank_without_a_sign_of_life_is_given_up(ranks: Found) -> None:
    assert "rank 1 has given no sign of life" in ranks[0]["alone"]["message"]


def test_without_a_process_group_one_process_plans() -> None:
    model, sample = make_model("words"), (torch.zeros(2, 6, dtype=torch.int64),)
    plan = distributed.plan(model, sample, budget="smallest", optimizer="adamw", time_limit=0.2)
    assert plan.optimizer == "adamw"
    assert distributed.fit(model, sample, recompute="blocks.*") is model
    assert memfit.plan_of(model) is not None


def test_the_forward_of_ddp_itself_is_not_captured() -> None:
    class Wrapped(nn.parallel.DistributedDataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    with pytest.raises(memfit.InvalidModel, match=r"model\.module"):
        memfit.plan(Wrapped(), torch.ones(1), budget=0.5)
