"""torchvision beside a build of torch it was not compiled for.

A torchvision wheel built for CUDA cannot load its compiled part beside a CPU build of torch.
Importing it (and timm, lightning and every transformers model class with it) then fails with
"operator torchvision::nms does not exist". Its models do not need that operator: declared
beforehand, the import goes through. Call `prepare` before the first such import.
"""

import functools
import importlib.util
from pathlib import Path

import torch

_MISSING = ("nms", "qnms")


@functools.cache
def prepare() -> torch.library.Library | None:
    """Declare the operators torchvision cannot define itself; does nothing where it can, or is absent."""
    specification = importlib.util.find_spec("torchvision")
    if specification is None or specification.origin is None:
        return None
    if _loads(next(Path(specification.origin).parent.glob("_C*.so"), None)):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in _MISSING:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _loads(compiled_part: Path | None) -> bool:
    if compiled_part is None:
        return False
    try:
        torch.ops.load_library(str(compiled_part))
    except OSError:
        return False
    return True
