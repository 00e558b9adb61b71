"""A process of its own that learns what the first steps of any model leave in a process.

    python -m memfit.runtime_probe   # a JSON line on stdout

`measure/process.py` starts it. Tensors here are small, so what the process has grown by is the runtime: code pages of
torch and its libraries, threads, objects of Python. Of two models that run by plans the second is longer: the
difference is what an operation of a captured graph takes. Another process plans for them, because planning leaves
more behind than running by a plan does.
"""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from memfit.api import apply, plan
from memfit.malloc import release_freed_memory
from memfit.measure.process import RuntimeMemory
from memfit.measure.process_probe import warm_up
from memfit.measure.process_status import resident_bytes, status_bytes
from memfit.plan.plan import Plan

_SHORT, _LONG = 4, 44  # blocks of the models
_BUDGET = 0.8  # of the unplanned peak: values are computed again, so that plans are what they usually are


def main() -> None:
    """Print what the runtime takes; with a folder as argument, write plans of both models into it instead."""
    if len(sys.argv) > 1:
        _write_plans(Path(sys.argv[1]))
        return
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not a result
    release_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-W", "ignore", "-m", "memfit.runtime_probe", folder], check=True)
        print(json.dumps(dataclasses.asdict(measured(Path(folder)))), file=results, flush=True)


def measured(folder: Path) -> RuntimeMemory:
    """Train eager, then a short and a long model by the plans in a folder."""
    rest_bytes, mapped_bytes = _settled_bytes(), status_bytes("VmData")
    warm_up()
    eager_bytes, eager_mapped_bytes = _settled_bytes() - rest_bytes, status_bytes("VmData") - mapped_bytes
    models, sizes, mapped, counts = [], [], [], []
    for blocks in (_SHORT, _LONG):
        made = Plan.load(_path(folder, blocks))
        assert made.step is not None
        graph = made.step.graph
        counts.append(len(graph.operations) + len(graph.alternatives))
        models.append(_trained(blocks, made))  # all of them live on
        del made, graph
        sizes.append(_settled_bytes() - rest_bytes)
        mapped.append(status_bytes("VmData") - mapped_bytes)
    operation_bytes = max(0, sizes[1] - sizes[0]) // counts[1]
    return RuntimeMemory(
        eager_bytes=max(0, eager_bytes),
        planned_bytes=max(0, sizes[0] - counts[0] * operation_bytes),
        operation_bytes=operation_bytes,
        eager_mapped_bytes=max(0, eager_mapped_bytes),
        planned_mapped_bytes=max(0, mapped[0] - counts[0] * operation_bytes),
    )


def _write_plans(folder: Path) -> None:
    for blocks in (_SHORT, _LONG):
        made = plan(_model(blocks), _image(), budget=_BUDGET, optimizer="sgd", time_limit=1.0)
        made.save(_path(folder, blocks))


def _path(folder: Path, blocks: int) -> Path:
    return folder / f"{blocks}.json"


def _settled_bytes() -> int:
    gc.collect()
    release_freed_memory()  # trims the heap
    return resident_bytes()


def _model(blocks: int) -> nn.Module:
    def block() -> list[nn.Module]:
        return [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]

    return nn.Sequential(*(module for _ in range(blocks) for module in block()))


def _image() -> torch.Tensor:
    return torch.randn(4, 8, 16, 16)


def _trained(blocks: int, made: Plan) -> nn.Module:
    model, image = _model(blocks), _image()
    apply(made, model, image)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(image).sum().backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    main()
