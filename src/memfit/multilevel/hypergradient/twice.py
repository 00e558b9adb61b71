"""Whether a loss can be differentiated twice, and who is to blame if not.

An operator whose backward pass is marked `once_differentiable` raises only where the gradient that reaches it
is itself differentiable; else torch takes its result for a constant and second derivatives are silently wrong. So
the graph of the first loss is looked through, once for each problem.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.function

from memfit import _torch
from memfit.errors import InvalidInput, first_line

if TYPE_CHECKING:
    from memfit.multilevel.problems import Problem

_SIGNS = ("is not implemented", "double backward", "once_differentiable", "differentiate twice")


def check_twice_differentiable(lower: "Problem", loss: torch.Tensor) -> None:
    """Refuse a loss with operators that are differentiated once only."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _is_once_only(node):
            raise InvalidInput(_refusal(lower, f"{_torch.node_name(node)} is differentiated once only"))
        waiting += [following for following, _ in node.next_functions]
    lower.is_known_twice_differentiable = True


@contextlib.contextmanager
def explaining(lower: "Problem") -> Iterator[None]:
    """Say which problem has an operator that cannot be differentiated twice."""
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error) for sign in _SIGNS):
            raise InvalidInput(_refusal(lower, first_line(error))) from error
        raise


def _is_once_only(node: Any) -> bool:
    function = getattr(node, "_forward_cls", None)
    backward = getattr(function, "backward", None)
    code = getattr(backward, "__code__", None)
    marked = code is not None and code.co_filename == torch.autograd.function.__file__  # the decorator's wrapper
    return marked or "CompiledFunction" in node.name()


def _refusal(lower: "Problem", reason: str) -> str:
    return (
        f"the problem {lower.name!r} is differentiated twice (method {lower.method!r}), but one of its operators "
        f'cannot be: {reason}; use type="darts" or "sama", or the operator\'s plain form (for attention '
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), for a compiled or planned module the module itself)"
    )
