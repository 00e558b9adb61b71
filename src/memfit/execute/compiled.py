"""One captured call of a module, ready to run."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memfit import _torch
from memfit.capture.trace import Joint
from memfit.errors import ExecutionError
from memfit.execute.codegen import generate
from memfit.execute.partition import planned_partition, unplanned_program
from memfit.ir import Graph, Program


class CompiledCall:
    """Runs a captured forward; gradients flow through the captured backward."""

    def __init__(self, joint: Joint, graph: Graph, program: Program | None = None) -> None:
        """Compile a traced call to run `program`; without one, to run as the eager model does."""
        self._template = joint.template
        self._differentiated = joint.differentiated
        self._guarded = joint.undifferentiated
        self._run = _compile(joint, graph, program or unplanned_program(graph))

    def __call__(self, states: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """Run on the current parameters and buffers (`states`) and the call's arguments."""
        tensors = list(self._run(*states, *args, **kwargs))
        if self._guarded:
            start = tensors[self._differentiated[0]]
            for index in self._guarded:
                tensors[index] = _NotDifferentiated.apply(tensors[index], start)
        return self._template.rebuild(tensors)


def _compile(joint: Joint, graph: Graph, program: Program) -> Callable[..., Any]:
    partition = planned_partition(graph, program)
    return _torch.compile_joint(joint.export, partition, lambda module: generate(module.graph))


class _NotDifferentiated(torch.autograd.Function):
    """An output beside the loss. It requires a gradient like the eager one, and says so if one arrives."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ExecutionError(
            "a gradient arrived at an output beside the loss, but this model was captured with a backward "
            'pass from its loss alone; capture it with backward_from="all" to differentiate every output'
        )
