"""A process of its own that learns what operators take of a process beyond what torch allocates.

    python -m memfit.measure.process_probe   # a JSON list of signatures on stdin, a JSON line for each on stdout

`measure/process.py` starts it. A line is written as soon as its operator has run, so that the lines before remain of a
probe that is killed for its memory.

Note [Cold and warm]
    The first call of an operator makes what its library keeps: oneDNN a primitive and its compiled code, MKL buffers
    for each thread. What is still there when its results and arguments are gone is `retained_bytes`. The second call
    shows what every later call takes while it runs, and how much of its results it writes to, `written_bytes`: pages
    that nobody writes to are not in memory. `rise_bytes` is what the second call takes, and pages of arguments that
    the first call was the first to write to.
"""

import json
import os
import sys
from typing import Any

import torch

from memfit import _torch
from memfit.malloc import release_freed_memory
from memfit.measure import probe
from memfit.measure import signature as signatures
from memfit.measure.available import available
from memfit.measure.process_status import process_rise, resident_bytes, status_bytes
from memfit.ops.calls import faithful_call
from memfit.tensors import tensors_in

_LARGEST_SHARE = 0.25  # of the memory that is free: arguments may take no more, results and buffers come on top


def main() -> None:
    """Probe what stdin names."""
    wanted = json.load(sys.stdin)
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not a result
    release_freed_memory()
    warm_up()
    for signature in wanted:
        try:
            line: dict[str, int | str] = {**probed(signature)}
        except Exception as error:  # an operator may reject made-up values
            line = {"failure": f"{type(error).__name__}: {error}"}
        print(json.dumps(line), file=results, flush=True)


def probed(signature: str) -> dict[str, int]:
    """Run an operator twice, see Note [Cold and warm]."""
    with torch.random.fork_rng(), _torch.no_modes(), torch.no_grad():
        if _argument_bytes(signature) > _LARGEST_SHARE * available().free_bytes:
            raise MemoryError("too big to measure here")
        start_bytes, start_mapped_bytes = resident_bytes(), status_bytes("VmData")
        risen_bytes, grown_bytes, written_bytes = _called(signature)
        retained_bytes = max(0, resident_bytes() - start_bytes)
        retained_mapped_bytes = max(0, status_bytes("VmData") - start_mapped_bytes)
    return {
        "rise_bytes": risen_bytes + max(0, grown_bytes - retained_bytes),
        "written_bytes": max(0, written_bytes),
        "retained_bytes": retained_bytes,
        "retained_mapped_bytes": retained_mapped_bytes,
    }


def _called(signature: str) -> tuple[int, int, int]:
    """Return the rise of the second call, the growth that the first call left, and what is written of results."""
    operator, args, kwargs = signatures.decode(signature)
    args = probe._PREPARATIONS.get(str(operator), probe._as_they_are)(args)
    call = faithful_call(operator)
    before_bytes = resident_bytes()
    call(*args, **kwargs)
    between_bytes = resident_bytes()
    results: list[Any] = []
    risen_bytes = process_rise(lambda: results.append(call(*args, **kwargs)))
    return risen_bytes, between_bytes - before_bytes, resident_bytes() - between_bytes


def warm_up() -> None:
    """Use what nearly every training step uses, so that no operator is charged for it."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(8)
    )
    optimizer: torch.optim.Optimizer | None = None
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.zeros(4, dtype=torch.long))
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loss.backward()
        optimizer.step()


def _argument_bytes(signature: str) -> int:
    with _torch.FakeTensorMode():
        _, args, kwargs = signatures.decode(signature)
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors_in((args, kwargs)))


if __name__ == "__main__":
    main()
