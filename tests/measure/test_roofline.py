import dataclasses

import pytest

from memfit.ir import Graph, Kind, Operation, Phase, Storage
from memfit.measure.devices import Device
from memfit.measure.roofline import estimated_time_us, roofline_times

# One teraflop a second is a million operations a microsecond, one gigabyte a second a thousand bytes.
DEVICE = Device(
    name="toy",
    memory_bytes=10**9,
    reserved_bytes=0,
    granularity_bytes=1,
    bandwidth_gb_per_s=1.0,
    tflops_fp32=1.0,
    tflops_half=4.0,
    launch_us=5.0,
)


def graph_of(*, flops: int = 0, input_bytes: int = 0, output_bytes: int = 0, dtype: str = "float32") -> Graph:
    storages = tuple(
        Storage(name=name, size_bytes=size_bytes, kind=Kind.TEMPORARY, dtype=dtype, shape=(size_bytes,))
        for name, size_bytes in (("input", input_bytes), ("output", output_bytes))
    )
    operation = Operation(name="op", target="op", phase=Phase.FORWARD, inputs=(0,), outputs=(1,), flops=flops)
    return Graph(storages=storages, operations=(operation,), resident=(0,), tangents=(), held=(1,))


def time_us(*, flops: int = 0, input_bytes: int = 0, output_bytes: int = 0, dtype: str = "float32") -> float:
    graph = graph_of(flops=flops, input_bytes=input_bytes, output_bytes=output_bytes, dtype=dtype)
    return estimated_time_us(graph, graph.operations[0], DEVICE)


def test_a_small_operation_is_bound_by_its_launch() -> None:
    assert time_us(flops=1, input_bytes=1) == 5.0


def test_much_arithmetic_is_bound_by_arithmetic() -> None:
    assert time_us(flops=20_000_000, input_bytes=1_000) == pytest.approx(20.0)


def test_much_traffic_is_bound_by_what_is_read_and_written() -> None:
    assert time_us(input_bytes=30_000, output_bytes=10_000) == pytest.approx(40.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_computes_faster(dtype: str) -> None:
    assert time_us(flops=80_000_000, dtype=dtype) == pytest.approx(20.0)


def test_the_longest_bound_wins() -> None:
    assert time_us(flops=20_000_000, input_bytes=30_000) == max(time_us(flops=20_000_000), time_us(input_bytes=30_000))


def test_operations_and_alternatives_have_times_by_name() -> None:
    graph = graph_of(input_bytes=30_000, output_bytes=10_000)
    cheaper = dataclasses.replace(graph.operations[0], name="cheaper", inputs=())
    times = roofline_times(dataclasses.replace(graph, alternatives=(cheaper,)), DEVICE)
    assert times == {"op": pytest.approx(40.0), "cheaper": pytest.approx(10.0)}


def test_without_a_device_times_are_those_of_some_processor() -> None:
    little, much = (roofline_times(graph_of(flops=flops))["op"] for flops in (1, 10**12))
    assert 0 < little < much
