"""A process of its own that trains a few steps, inside a hard limit if one is given.

    python -m memfit.cli.demo_process '{"model": {...}, "steps": 3, ...}'   # a JSON line on stdout

The system enforces the limit: `RLIMIT_DATA` is what the process has mapped when everything is imported, and the
limit's bytes more for model, batch, optimizer, training and planning.
"""

import dataclasses
import gc
import hashlib
import json
import os
import resource
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from memfit.api import fit
from memfit.errors import MemfitError, first_line
from memfit.malloc import release_freed_memory
from memfit.measure.process_status import high_water_bytes, reset_high_water, resident_bytes, status_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tagger:
    """A Transformer that puts every word of a text into a class: all of it comes with torch."""

    words: int
    width: int
    heads: int
    layers: int
    classes: int
    batch_size: int
    tokens: int

    def build(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(self.width, self.heads, batch_first=True)
        encoder = nn.TransformerEncoder(layer, self.layers)
        return nn.Sequential(nn.Embedding(self.words, self.width), encoder, nn.Linear(self.width, self.classes))

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Random texts with random classes."""
        shape = (self.batch_size, self.tokens)
        return torch.randint(self.words, shape), torch.randint(self.classes, shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Tell a process its task."""

    model: Tagger
    steps: int
    seed: int
    limit_bytes: int | None = None  # None: no limit
    budget_bytes: int | None = None  # of allocated bytes, for `memfit.fit`; None: plain PyTorch
    releases: bool = False  # call `release_freed_memory` first
    time_limit_s: float = 2.5  # of the search for a plan

    @classmethod
    def from_json(cls, text: str) -> "Task":
        fields = json.loads(text)
        return cls(**fields | {"model": Tagger(**fields["model"])})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """Hold the outcome of a process."""

    failure: str = ""  # empty: all steps ran
    losses: tuple[float, ...] = ()
    weights: str = ""  # a digest of all parameters after the last step
    step_s: tuple[float, ...] = ()
    planning_s: float = 0.0
    peak_bytes: int = 0  # in memory, beyond what the process had before the model was built


def main() -> None:
    """Do what the argument says, and print what became of it."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not a result
    trained = run(Task.from_json(sys.argv[1]))
    print(json.dumps(dataclasses.asdict(trained)), file=results, flush=True)


def run(task: Task) -> Trained:
    """Train, inside the limit if there is one; an error that memory is short is a result."""
    if task.releases:
        release_freed_memory()
    with torch.device("meta"):
        task.model.build()  # imports what building needs
    gc.collect()
    rest_bytes = resident_bytes()
    reset_high_water()
    if task.limit_bytes is not None:
        most_bytes = status_bytes("VmData") + task.limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    try:
        trained = _train(task)
    except (MemoryError, RuntimeError, MemfitError) as error:
        return Trained(failure=f"{type(error).__name__}: {first_line(error)}")
    return dataclasses.replace(trained, peak_bytes=high_water_bytes() - rest_bytes)


def _train(task: Task) -> Trained:
    torch.manual_seed(task.seed)
    model, (texts, classes) = task.model.build(), task.model.batch()
    optimizer = torch.optim.AdamW(model.parameters())
    start = time.perf_counter()
    if task.budget_bytes is not None:
        fit(model, texts, task.budget_bytes, optimizer=optimizer, time_limit=task.time_limit_s, progress=False)
    planning_s = time.perf_counter() - start
    losses, step_s = [], []
    for number in range(task.steps):
        start = time.perf_counter()
        torch.manual_seed(task.seed + number)  # of dropout
        loss = F.cross_entropy(model(texts).flatten(0, 1), classes.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step_s.append(time.perf_counter() - start)
    return Trained(losses=tuple(losses), weights=_digest(model), step_s=tuple(step_s), planning_s=planning_s)


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().data)
    return digest.hexdigest()


def trained_from(fields: dict[str, Any]) -> Trained:
    """Read what a process has printed."""
    lists = {name: tuple(fields[name]) for name in ("losses", "step_s")}
    return Trained(**fields | lists)


if __name__ == "__main__":
    main()
