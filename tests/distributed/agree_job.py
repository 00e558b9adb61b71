"""One rank among two that are to agree: when they do, and in every way in which they may not."""

import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ddp_models import make_batch, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memfit
from memfit import api, distributed
from memfit.distributed.board import Board

GROUP_TIMEOUT_S = 1.0  # of a group that plans for longer


class Curved(nn.Module):
    """The same parameters, another computation."""

    def __init__(self, bend: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)
        self.bend = bend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.bend(self.first(x)))


class Branching(nn.Module):
    """Cannot be captured whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return -x if x.sum() > 1e9 else x


def broken(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("this rank has a broken part")


def heard(act: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": act()}
    except memfit.MemfitError as error:
        return {"error": type(error).__name__, "message": str(error), "fields": dict(vars(error))}


def planned(model: nn.Module, rows: int = 4, **options: Any) -> dict[str, Any]:
    options = {"budget": "smallest", "time_limit": 0.2} | options
    plan = distributed.plan(model, torch.ones(rows, 8), **options)
    return {"plan": plan.to_json(), "regions": list(plan.regions), "state_bytes": plan.optimizer_state_bytes}


def fitted() -> dict[str, Any]:
    """A model inside DDP, by a plan that all ranks have."""
    wrapped = DistributedDataParallel(make_model("words"))
    sample = (make_batch("words", 0)[0],)
    returned = distributed.fit(wrapped, sample, "smallest", optimizer="adamw", time_limit=0.5)
    plan = memfit.plan_of(wrapped.module)
    return {"same": returned is wrapped, "optimizer": plan.optimizer, "digest": plan.program.graph_digest}


def refused_on_one() -> dict[str, Any]:
    """Rank 1 cannot apply a plan, because its model runs by one already; nothing is changed on rank 0."""
    model = Curved(torch.relu)
    if dist.get_rank() == 1:
        memfit.fit(model, torch.ones(4, 8))
    found = heard(lambda: distributed.fit(model, torch.ones(4, 8), "smallest", time_limit=0.2) and None)
    return found | {"left as it was": ("forward" in vars(model)) == (dist.get_rank() == 1)}


def slowly(seconds: float) -> Any:
    real = api.plan

    def plan(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return real(*args, **options)

    return mock.patch.object(api, "plan", plan)


def alone() -> dict[str, Any]:
    """Rank 1 does not come."""
    if dist.get_rank() == 0:
        return heard(lambda: Board(patience_s=1.0).decided("", lambda words: ""))
    time.sleep(1.5)
    return {}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    impatient = dist.new_group(timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S))
    one = dist.get_rank() == 1
    found: dict[str, Any] = {}
    found["agreed"] = heard(lambda: planned(Curved(torch.relu), optimizer="adamw"))
    found["regions"] = heard(lambda: planned(Branching()))
    found["fitted"] = heard(fitted)
    found["unplanned"] = heard(lambda: memfit.plan_of(distributed.fit(Curved(torch.relu), torch.ones(4, 8))))
    found["shape"] = heard(lambda: planned(Curved(torch.relu), rows=5 if one else 4))
    found["graph"] = heard(lambda: planned(Curved(torch.tanh if one else torch.relu)))
    found["options"] = heard(lambda: planned(Curved(torch.relu), budget=0.9 if one else 0.8))
    found["capture"] = heard(lambda: planned(Curved(broken if one else torch.relu)))
    with mock.patch.object(torch, "__version__", "9.9.9") if one else mock.patch.object(torch, "e", torch.e):
        found["torch"] = heard(lambda: planned(Curved(torch.relu)))
    found["budget"] = heard(lambda: planned(Curved(torch.relu), budget="1KiB"))
    found["refused"] = refused_on_one()
    with slowly(2 * GROUP_TIMEOUT_S):
        found["slow"] = heard(lambda: planned(Curved(torch.relu), group=impatient))
    found["alone"] = alone()
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
