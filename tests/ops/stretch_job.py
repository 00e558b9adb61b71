"""A process that fits a small model with compiled kernels and says what happened, as JSON."""

import json
import logging
import sys

import torch
from torch import nn

import memfit  # before torch's compiler, which makes its cache when it is imported


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 8, 3, padding=1))


def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model(batch).square().mean().backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


def main() -> None:
    from torch._dynamo.utils import counters

    heard = Heard()
    logging.getLogger("memfit").addHandler(heard)
    batch = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    model = memfit.fit(make(), batch, budget=0.95, kernels="inductor", time_limit=1.0)
    expected, found = (torch.cat([each.flatten() for each in gradients(one, batch)]) for one in (make(), model))
    json.dump(
        {
            "difference": float((found - expected).norm() / expected.norm()),
            "warnings": heard.messages,
            "compiled": counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"],
            "found": counters["inductor"]["fxgraph_cache_hit"],
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
