"""What the pages of the documentation take for granted: a model, a batch, an optimizer.

An attribute is a name that blocks of code may use; it is made when a block first mentions it. Models are tiny, names
and calls are those of the page.
"""

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memfit
import memfit.distributed
import memfit.multilevel

WIDTH, CLASSES, ROWS = 16, 4, 96  # rows enough for half of the peak to be far from the smallest


class Model(nn.Module):
    """Blocks whose activations outweigh their parameters; it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return F.cross_entropy(self.head(inputs), labels)


class Given:
    """Names that any page may use."""

    each_block_alone = False  # True: names are made anew for every block

    memfit = memfit
    torch = torch
    nn = nn
    F = F
    Model = Model
    device = "cpu"
    budget = "1MiB"

    @functools.cached_property
    def model(self) -> nn.Module:
        return Model()

    @functools.cached_property
    def batch(self) -> Any:
        return torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))

    @functools.cached_property
    def sample(self) -> Any:
        return self.batch

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters())

    @staticmethod
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(*batch)

    @functools.cached_property
    def loader(self) -> Any:
        return DataLoader(TensorDataset(*self.batch), batch_size=ROWS // 2)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class WithFiles(Given):
    """Pages that name a directory for the disk tier and a file of weights."""

    def __init__(self) -> None:
        Path("scratch").mkdir(exist_ok=True)
        memfit.save(Model().to(torch.bfloat16), "model.safetensors")


class OneRank(Given):
    """A process group of one."""

    def __init__(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Report(Given):
    @functools.cached_property
    def plan(self) -> memfit.Plan:
        plan = memfit.plan(self.model, self.sample, budget="smallest", time_limit=1)
        plan.save("plan.json")
        return plan

    @functools.cached_property
    def frontier(self) -> memfit.Frontier:
        return memfit.frontier(self.model, self.sample, fractions=(0.8,), time_limit=2)

    @functools.cached_property
    def profile(self) -> memfit.Profile:
        return memfit.profile(self.model, self.plan, self.sample, pairs=1, eager=True)


class Levels(Given):
    """A classifier, and a network that weighs its samples."""

    @functools.cached_property
    def network(self) -> nn.Module:
        return nn.Linear(WIDTH, CLASSES)

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.network.parameters(), lr=0.1)

    @functools.cached_property
    def scheduler(self) -> Any:
        return torch.optim.lr_scheduler.StepLR(self.optimizer, 100)

    @functools.cached_property
    def weigher(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())

    @functools.cached_property
    def weigher_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.weigher.parameters())

    @functools.cached_property
    def balanced_loader(self) -> Any:
        return self.loader


class Classifier(memfit.multilevel.ImplicitProblem):
    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        losses = F.cross_entropy(self(inputs), labels, reduction="none")
        return (self.reweight(losses.detach().unsqueeze(1)).squeeze(1) * losses).mean()


class Reweight(memfit.multilevel.ImplicitProblem):
    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.classifier(inputs), labels)


class Tools(Given):
    """Trainer, Lightning and Accelerate around a GPT-2 of one layer."""

    each_block_alone = True
    lengths = (8, 8, 9, 12, 15, 16)

    @functools.cached_property
    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 32}
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, **tokens, use_cache=False, loss_type="ForCausalLM"))

    @functools.cached_property
    def batch(self) -> Any:
        words = torch.randint(50, (8, 16))
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}

    @staticmethod
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(**batch).loss

    @property
    def data(self) -> Any:
        return [{"input_ids": torch.arange(1, 17)} for _ in range(32)]

    @staticmethod
    def collator(samples: Any) -> Any:
        words = torch.stack([sample["input_ids"] for sample in samples])
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}

    @functools.cached_property
    def loader(self) -> Any:
        return DataLoader(self.data, batch_size=8, collate_fn=self.collator)

    @property
    def Trainer(self) -> Any:  # noqa: N802  (the page's name)
        from transformers import Trainer

        return Trainer

    @property
    def args(self) -> Any:
        from transformers import TrainingArguments

        quiet = {"report_to": "none", "disable_tqdm": True}
        return TrainingArguments(output_dir="run", max_steps=2, per_device_train_batch_size=8, use_cpu=True, **quiet)

    @property
    def L(self) -> Any:  # noqa: N802  (the page's name)
        import lightning

        return lightning

    @property
    def accelerator(self) -> Any:
        from accelerate import Accelerator

        return Accelerator(cpu=True)


class Readme(Given):
    """Each block of the front page stands for itself."""

    each_block_alone = True


class Zoo(Given):
    @property
    def torchvision(self) -> Any:
        import torchvision

        return torchvision


PREAMBLES: dict[str, type[Given]] = {
    "README.md": Readme,
    "distributed.md": OneRank,
    "fsdp.md": OneRank,
    "integrations.md": Tools,
    "multilevel.md": Levels,
    "out-of-memory.md": WithFiles,
    "report.md": Report,
    "step.md": WithFiles,
    "zoo.md": Zoo,
}
