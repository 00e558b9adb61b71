"""A process that fits a small model with compiled kernels and says what happened, as JSON."""

import json
import logging
import sys
from typing import Any

import torch
from torch import nn

import memfit  # before torch's compiler, which makes its cache when it is imported
from memfit.ops import stretch


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def make() -> nn.Module:
    torch.manual_seed(0)
    # No convolutions: whether images had their channels last would depend on which of two steps is faster.
    return nn.Sequential(nn.Linear(32, 128), nn.LayerNorm(128), nn.SiLU(), nn.Linear(128, 16))


def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model(batch).square().mean().backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


def count_kept(found: list[str]) -> None:
    """Note which kernels are found without Inductor."""
    own = stretch.kept_kernel

    def look(digest: str) -> Any:
        call = own(digest)
        found.extend([digest] if call is not None else [])
        return call

    stretch.kept_kernel = look


def main() -> None:
    from torch._dynamo.utils import counters

    kept: list[str] = []
    count_kept(kept)
    heard = Heard()
    logging.getLogger("memfit").addHandler(heard)
    batch = torch.randn(2**15, 32, generator=torch.Generator().manual_seed(1))
    model = memfit.fit(make(), batch, budget=0.95, kernels="inductor", time_limit=1.0, remember=False)
    expected, found = (torch.cat([each.flatten() for each in gradients(one, batch)]) for one in (make(), model))
    json.dump(
        {
            "difference": float((found - expected).norm() / expected.norm()),
            "warnings": heard.messages,
            "compiled": counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"],
            "found": counters["inductor"]["fxgraph_cache_hit"],
            "kept": len(kept),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
