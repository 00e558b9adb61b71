"""Cut a joint graph into the forward and the backward graph that a program describes."""

from collections.abc import Callable
from typing import Any

from torch import fx

from memfit import _torch
from memfit.execute.collapse_views import mark_contiguous
from memfit.execute.handover import insert_hand_overs
from memfit.execute.rebuild import rebuild
from memfit.ir import Compute, Graph, Instruction, Phase, Program

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def planned_partition(graph: Graph, program: Program) -> Partition:
    """Run what the program says, where it says so; `graph` is what the joint graph was lowered to."""

    def partition(
        joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        rebuilt, saved = rebuild(joint, graph, program, num_fwd_outputs)
        mark_contiguous(rebuilt.graph)
        forward, backward = _torch.split_joint(rebuilt, saved, num_fwd_outputs)
        insert_hand_overs(backward.graph, [node for node in joint.graph.nodes if node.op == "placeholder"])
        return forward, backward

    return partition


def unplanned_program(graph: Graph) -> Program:
    """Every operation once, in the eager run's order and in place where it is; all values live while they are read.

    The eager run itself may do more, see Note [Checkpoints] in `ir.py`.
    """
    passes: dict[Phase, list[Instruction]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
    for index, operation in enumerate(graph.operations):
        passes[operation.phase].append(Compute(index, operation.overwrites is not None))
    return Program(
        graph_digest=graph.digest(),
        forward=tuple(passes[Phase.FORWARD]),
        backward=tuple(passes[Phase.BACKWARD]),
    )
