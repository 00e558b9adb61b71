"""What DistributedDataParallel holds beside a training step: its buckets.

Note [Buckets]
    DDP has room for one copy of all gradients, cut into buckets that are sent as a whole, from the moment a model is
    wrapped. A gradient is copied into its bucket when it is complete. Without views it also stays where it is,
    so that all gradients are in memory twice. With `gradient_as_bucket_view=True` the parameter's gradient becomes a
    view of the bucket and the first copy is gone at once; a captured backward pass hands its gradients out together,
    so there both copies live when it ends.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from torch import nn

from memfit.ir import Compute, Graph, Kind, Operation, Phase, Storage
from memfit.step.hand_over import with_updates
from memfit.unplanned import UnplannedStep

MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketPolicy:
    """How DDP cuts its buckets; the defaults are DDP's own."""

    cap_mib: float = 25.0  # `bucket_cap_mb`
    first_mib: float = 1.0  # the bucket that is sent first, so that communication starts early
    views: bool = False  # `gradient_as_bucket_view`
    broadcast_buffers: bool = True  # the first rank's buffers go to all before every step


def bucket_bytes(parameters: Sequence[nn.Parameter], policy: BucketPolicy | None = None) -> list[int]:
    """The sizes of DDP's buckets, in the order in which they are sent.

    Gradients are taken to arrive in reverse order of the parameters; the sum does not depend on that.
    """
    policy = policy or BucketPolicy()
    limits = (int(policy.first_mib * MIB), int(policy.cap_mib * MIB))
    done: list[int] = []
    open_bytes: dict[object, int] = defaultdict(int)
    closed: dict[object, int] = defaultdict(int)
    for parameter in reversed([each for each in parameters if each.requires_grad]):
        key = parameter.dtype, parameter.device
        open_bytes[key] += parameter.numel() * parameter.element_size()
        if open_bytes[key] >= limits[min(closed[key], 1)]:
            done.append(open_bytes.pop(key))
            closed[key] += 1
    return [*done, *open_bytes.values()]


def with_buckets(step: UnplannedStep, model: nn.Module, policy: BucketPolicy) -> UnplannedStep:
    """The step of a rank whose model is inside DDP, see Note [Buckets]."""
    graph, program, workspaces = step.graph, step.program, list(step.workspace_bytes)
    if policy.views:
        graph, program, workspaces = with_updates(graph, program, workspaces, update_bytes=0, label="into bucket")
    graph = _with_resident(graph, bucket_bytes(list(model.parameters()), policy))
    buffer_bytes = sum(each.numel() * each.element_size() for each in model.buffers())
    if policy.broadcast_buffers and buffer_bytes:
        graph = dataclasses.replace(graph, alternatives=(*graph.alternatives, _BROADCAST))
        sent = Compute(len(graph.operations) + len(graph.alternatives) - 1)
        program = dataclasses.replace(program, forward=(sent, *program.forward))
        workspaces.append(buffer_bytes)
    return dataclasses.replace(step, graph=graph, program=program, workspace_bytes=tuple(workspaces))


_BROADCAST = Operation(
    name="broadcast of buffers", target="memfit.broadcast", phase=Phase.FORWARD, inputs=(), outputs=()
)


def _with_resident(graph: Graph, sizes: Sequence[int]) -> Graph:
    first = len(graph.storages)
    buckets = [
        Storage(name=f"bucket {number}", size_bytes=size, kind=Kind.GRADIENT, dtype="uint8", shape=(size,))
        for number, size in enumerate(sizes)
    ]
    return dataclasses.replace(
        graph,
        storages=(*graph.storages, *buckets),
        resident=(*graph.resident, *range(first, first + len(buckets))),
    )
