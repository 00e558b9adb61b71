"""One rank: ResNet-50 and GPT-2 at small sizes, planned against eager inside DDP, without dropout.

standard_job.py FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memfit
from benchmarks.models import Case, rank_cases
from memfit import distributed
from memfit.cli.torchvision_repair import prepare
from memfit.tensors import same_bits


def trained(case: Case, plan: memfit.Plan | None, **options: Any) -> dict[str, torch.Tensor]:
    """Gradients of the second of two steps, and where they led."""
    model = make_model(case)
    if plan is not None:
        memfit.apply(plan, model)
    wrapped = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(7 + dist.get_rank())
    for _ in range(2):
        optimizer.zero_grad()
        case.loss(wrapped, case.make_batch(case.batch_size)).backward()
        optimizer.step()
    gradients = {f"gradient {name}": each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name: each.clone() for name, each in (gradients | dict(model.state_dict())).items()}


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = case.make_model().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def main(folder: Path) -> None:
    prepare()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for case in rank_cases():
        sample = case.sample(case.make_batch(case.batch_size))
        plan = distributed.plan(make_model(case), sample, budget="smallest", outputs=case.outputs or "all")
        eager = trained(case, None)
        for views in (False, True):
            planned = trained(case, plan, gradient_as_bucket_view=views)
            different = [name for name in eager if not same_bits(planned[name], eager[name])]
            found[f"{case.name}, views {views}"] = {
                "compared": len(eager),
                "different": different,
                "peak": plan.peak_bytes / plan.unplanned_peak_bytes,
            }
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
