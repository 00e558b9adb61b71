"""Which line of code a stack belongs to: the innermost that is not a library's own."""

import functools
import re
from typing import NamedTuple

SEPARATOR = " < "
BEFORE = "before the recording"
NO_STACK = "blocks without a recorded stack"

_PYTHON_LINE = re.compile(r"(?P<path>.+\.py):(?P<line>\d+):(?P<name>.*)")
_AUTOGRAD_NODE = re.compile(r"\b(\w+Backward\d*)\b")
# First folders, as snapshots shorten paths: those of torch and of what stands between it and a model.
_LIBRARIES = frozenset(
    {
        *("torch", "modules", "nn", "functional", "autograd", "optim", "amp", "cuda", "utils", "fx", "fx_passes", "ao"),
        *("passes", "runtime", "nvidia", "triton", "einops", "einx", "accelerate", "_inductor", "_aot_autograd"),
        *("_dynamo", "_functorch", "_subclasses", "_prims", "_higher_order_ops", "_library", "distributed"),
    }
)


class Owner(NamedTuple):
    """Who asked for memory."""

    line: str  # "model.py:54 in forward", or what is known instead
    operator: str  # "einsum", or ""


@functools.lru_cache(maxsize=65536)
def owner_of(stack: str) -> Owner:
    """Name the line that a stack belongs to, and the operator that it called.

    >>> owner_of("at::native::einsum < torch/functional.py:373:einsum < model.py:39:forward < train.py:7:main")
    Owner(line='model.py:39 in forward', operator='einsum')
    >>> owner_of("torch::autograd::generated::BmmBackward0::apply").line
    'backward of Bmm'
    """
    calls = [call for call in stack.split(SEPARATOR) if call]
    operator = next((_short(call) for call in calls if not _PYTHON_LINE.fullmatch(call)), "")
    lines = [match for match in map(_PYTHON_LINE.fullmatch, calls) if match]
    own = next((match for match in lines if not is_library(match["path"])), None)
    if own is not None:
        return Owner(f"{own['path']}:{own['line']} in {own['name']}", operator)
    node = _AUTOGRAD_NODE.search(stack)
    if node is not None:
        return Owner(f"backward of {re.sub(r'Backward[0-9]*$', '', node[1])}", operator)
    if lines:
        return Owner(f"{lines[0]['path']}:{lines[0]['line']} in {lines[0]['name']}", operator)
    return Owner(f"inside {operator}" if operator else NO_STACK, operator)


def is_library(path: str) -> bool:
    """Tell the files of torch, of Python and of what stands between torch and a model, by their first folder."""
    first = path.split("/")[0]
    return first in _LIBRARIES or re.fullmatch(r"python3\.\d+", first) is not None


def _short(call: str) -> str:
    """`at::native::einsum(...)` as `einsum`."""
    name = call.partition("(")[0].rstrip(":").split("::")
    return next((part for part in reversed(name) if part not in ("", "apply", "call")), call)[:80]
