"""The models that the tests of sharded runs train, in one process and in several."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from memfit.cli.torchvision_repair import prepare

BATCH = 8
STEPS = 20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(1))  # on one rank alone

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.scale * self.down(F.gelu(self.up(self.norm(values))))


class Blocks(nn.Module):
    """Three equal blocks between a linear layer and a loss; 33 rows cannot be shared out evenly."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 33)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        for block in self.blocks:
            values = block(values)
        return self.head(values).square().mean()


def sharded(model: nn.Module, units: list[nn.Module], *, rows: int = 1, **policies: Any) -> nn.Module:
    """On a mesh of one dimension; with several rows on one of two, along the first of which shards are replicated."""
    columns = dist.get_world_size() // rows
    if rows == 1:
        mesh = init_device_mesh("cpu", (columns,))
    else:
        mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("copies", "shards"))
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh, **policies)
    return model


def rank_part(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def trained(
    model: nn.Module,
    steps: int,
    part: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Train on batches that are the same for every number of ranks; `part` takes a rank's share."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(steps):
        batch = torch.randn(BATCH, 16, 32, generator=torch.Generator().manual_seed(number))
        model(part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


def gpt2(big: bool) -> nn.Module:
    prepare()
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, tokens = (6, 256, 128) if big else (2, 64, 64)
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=4,
        vocab_size=1000 if big else 101,
        n_positions=tokens,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    config.loss_type = "ForCausalLM"
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def words(big: bool) -> torch.Tensor:
    size = (8, 128) if big else (8, 64)
    return torch.randint(0, 100, size, generator=torch.Generator().manual_seed(0))


def resnet(big: bool) -> nn.Module:
    prepare()
    from torchvision.models.resnet import Bottleneck, ResNet

    torch.manual_seed(0)
    if big:
        return ResNet(Bottleneck, [3, 4, 6, 3])  # ResNet-50
    return ResNet(Bottleneck, [2, 1, 1, 1], num_classes=10, width_per_group=16)
