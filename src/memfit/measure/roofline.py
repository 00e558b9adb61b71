"""How long an operation would take on a device that is not here.

The roofline: an operation is bound by arithmetic, by memory traffic or by its launch,
whichever takes longest. An estimate, not a measurement: real kernels reach 40 to 90% of it.
"""

from memfit.ir import Graph, Operation
from memfit.measure.devices import Device

_HALF = {"float16", "bfloat16"}

# Where no device is named. Only shares of a step are ever told of it, and for these the ratio of
# arithmetic to bandwidth counts: a few cores with vector units and one memory between them.
_SOME_CPU = Device(
    name="CPU",
    memory_bytes=0,
    reserved_bytes=0,
    granularity_bytes=1,
    bandwidth_gb_per_s=20,
    tflops_fp32=0.15,
    tflops_half=0.15,
    launch_us=2.0,
)


def roofline_times(graph: Graph, device: Device | None = None) -> dict[str, float]:
    """Microseconds by the name of every operation and alternative; in place takes as long as into new memory."""
    operations = (*graph.operations, *graph.alternatives)
    return {operation.name: estimated_time_us(graph, operation, device or _SOME_CPU) for operation in operations}


def estimated_time_us(graph: Graph, operation: Operation, device: Device) -> float:
    """The least time `operation` can take on `device`."""
    storages = [graph.storages[index] for index in (*operation.inputs, *operation.outputs)]
    moved_bytes = sum(storage.size_bytes for storage in storages)
    is_half = any(storage.dtype in _HALF for storage in storages)
    tflops = device.tflops_half if is_half else device.tflops_fp32
    arithmetic_us = operation.flops / (tflops * 1e6)
    traffic_us = moved_bytes / (device.bandwidth_gb_per_s * 1e3)
    return max(arithmetic_us, traffic_us, device.launch_us)
