"""torchvision's models, also beside a CPU build of torch."""

import importlib
from typing import Any

from torch import nn

from memfit.cli.torchvision_repair import prepare


def model(name: str, **options: Any) -> nn.Module:
    """A torchvision model with random weights."""
    prepare()
    make = getattr(importlib.import_module("torchvision.models"), name)
    built: nn.Module = make(**options)
    return built
