"""One rank of a run that saves after every step and goes on where it stood; rank 1 may be killed in the middle of one.

killed_job.py FOLDER STEPS DIES_AT
"""

import datetime
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memfit
from memfit import distributed

TIMEOUT_S = 8.0


def make_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(6, 8, generator=own), torch.randint(4, (6,), generator=own)


def main(folder: Path, steps: int, dies_at: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    torch.manual_seed(dist.get_rank())  # other numbers for dropout on every rank
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 4))
    distributed.fit(model, make_batch(0)[0], recompute="2")
    wrapped = DistributedDataParallel(model)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        value = F.cross_entropy(model(batch[0]), batch[1])
        if dist.get_rank() == 1 and step.position.batches == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    step = memfit.Step(wrapped, torch.optim.AdamW(model.parameters(), lr=0.01), loss)
    distributed.resume(step, folder)
    print(f"from {step.position.batches}", flush=True)
    while step.position.batches < steps:
        step(make_batch(step.position.batches))
        if dist.get_rank() == 0 or step.position.batches != dies_at:  # the last one is not there on all ranks
            distributed.save(step, folder)
    save_file(model.state_dict(), folder / f"end{dist.get_rank()}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
