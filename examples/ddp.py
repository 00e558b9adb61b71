"""Train one model on several processes by one plan, stop, and go on.

torchrun --standalone --nproc-per-node 2 examples/ddp.py          (or plain python: one process)
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memfit
from memfit import distributed
from memfit.units import format_bytes

vocabulary, width, tokens, sentences = 500, 128, 64, 64  # sentences of all ranks together
several = "RANK" in os.environ  # torchrun says so
if several:
    dist.init_process_group("gloo")  # "nccl" on GPUs
rank, world_size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
torch.set_num_threads(1)


class Model(nn.Module):
    """Residual layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(4)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def make_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One share of a batch, that of the rank at hand."""
    words = torch.randint(vocabulary, (sentences, tokens), generator=torch.Generator().manual_seed(number))
    share = words.chunk(world_size)[rank]
    return share, share.roll(-1, 1)


def say(words: str) -> None:
    if rank == 0:
        print(words, flush=True)


def make_step() -> memfit.Step:
    torch.manual_seed(0)  # the same parameters on every rank
    model = Model()
    memfit.apply(plan, model)
    trained = DistributedDataParallel(model) if several else model
    # Micro-batches: only the last of them makes the ranks talk to each other.
    return memfit.Step(trained, torch.optim.AdamW(model.parameters(), lr=1e-3), loss, micro_batches=2)


# 1. What would a rank take, also of many? No process group is needed for that.
for shard in distributed.STRATEGIES:
    estimate = distributed.estimate(Model(), make_batch(0)[0], optimizer="adamw", world_size=8, shard=shard)
    say(f"one of 8 ranks, {shard}: {format_bytes(estimate.peak_bytes)}")

# 2. One plan: made on the first rank, checked on all. The budget is one rank's, DDP's buckets included.
sample = make_batch(0)[0].chunk(2)[0]  # a micro-batch
plan = distributed.plan(Model(), sample, budget=0.9, optimizer="adamw", time_limit=2.0)
say(str(plan))

# 3. Train, save, and go on in a new step; on the numbers of the run that never stopped.
directory = Path(os.environ.get("CHECKPOINTS", tempfile.gettempdir())) / f"memfit-ddp-{world_size}"
whole, stopped = make_step(), make_step()
losses = [whole(make_batch(number)) for number in range(6)]
for number in range(3):
    stopped(make_batch(number))
distributed.save(stopped, directory)
resumed = make_step()
done = distributed.resume(resumed, directory)
again = [resumed(make_batch(number)) for number in range(done, 6)]
same = all(torch.equal(one, other) for one, other in zip(losses[done:], again, strict=True))
say(f"losses {', '.join(f'{value:.4f}' for value in losses)}")
say(f"resumed after {done} batches, equal bit for bit: {same}")

if several:
    dist.destroy_process_group()
if not same:
    raise SystemExit("the resumed run differs")
