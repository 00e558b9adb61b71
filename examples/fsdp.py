"""Train a model sharded by FSDP2 inside a budget for each rank, stop, and go on from the checkpoint.

torchrun --nproc-per-node 2 examples/fsdp.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import memfit
from memfit.distributed import fit_sharded, load_sharded, save_sharded
from memfit.measure.peak import measure_peak
from memfit.units import format_bytes

vocabulary, width, tokens, sentences = 500, 128, 128, 8  # sentences of one rank


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.attend(self.norms[0](hidden)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.mix(mixed)
        return hidden + self.down(F.gelu(self.up(self.norms[1](hidden))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)  # the same start on all ranks
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:  # a unit each: gathered when its forward begins, let go of when it ends
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def make_batch(number: int) -> torch.Tensor:
    own = torch.Generator().manual_seed(1000 * number + dist.get_rank())  # every rank has its own share
    return torch.randint(vocabulary, (sentences, 1), generator=own).expand(-1, tokens).contiguous()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> float:
    for number in range(first, last):
        loss = model(make_batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def say(message: str) -> None:
    if dist.get_rank() == 0:
        print(message, flush=True)


def main() -> None:
    dist.init_process_group("gloo")  # plans of sharded models are measured on CPUs so far
    model, optimizer = make()
    # 0.6 of what a rank would need without a plan; as well a number of bytes, or "6GiB".
    fit_sharded(model, make_batch(0), budget=0.6, optimizer=optimizer, time_limit=10)
    plan = memfit.plan_of(model)
    assert plan is not None
    say(f"unplanned {format_bytes(plan.unplanned_peak_bytes)} a rank, budget {format_bytes(plan.budget_bytes or 0)}")
    say(f"predicted {format_bytes(plan.peak_bytes)}, {plan.slowdown:+.1%} time, {len(plan.regions)} units and parts")

    train(model, optimizer, 0, 2)
    measured = measure_peak(lambda: train(model, optimizer, 2, 3), resident=[model, optimizer])
    print(f"rank {dist.get_rank()}: measured {format_bytes(measured.peak_bytes)}", flush=True)

    folder = Path(tempfile.gettempdir()) / "memfit-fsdp-example"  # on several nodes: a folder that all of them see
    save_sharded(folder, model, optimizer, extra={"batches": 3})
    end = train(model, optimizer, 3, 6)

    other, its_optimizer = make()  # a run that starts anew, on any number of ranks
    done = load_sharded(folder, other, its_optimizer)["batches"]
    again = train(other, its_optimizer, done, 6)
    say(f"loss {end:.6f}; from the checkpoint, without a plan, {again:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
