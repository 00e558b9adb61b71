"""torchvision's models beside a CPU build of torch.

Its wheel is built against CUDA: imported beside a CPU torch it fails because two operators
that only its compiled part defines are missing. They are declared here first (no model in
use calls them), and the import goes through.
"""

import functools
import importlib
from typing import Any

import torch
from torch import nn

_MISSING = ("nms", "qnms")


@functools.cache
def prepare() -> torch.library.Library | None:
    """Declare what torchvision misses; must run before torchvision, timm or transformers is imported."""
    if torch.cuda.is_available():
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in _MISSING:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def model(name: str, **options: Any) -> nn.Module:
    """A torchvision model with random weights."""
    prepare()
    make = getattr(importlib.import_module("torchvision.models"), name)
    built: nn.Module = make(**options)
    return built
