import pytest

from memfit.ir import Graph, Kind, Operation, Phase, Storage
from memfit.measure.devices import Device
from memfit.measure.roofline import estimated_time_us

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


def time_us(*, flops: int = 0, input_bytes: int = 0, output_bytes: int = 0, dtype: str = "float32") -> float:
    storages = tuple(
        Storage(name=name, size_bytes=size_bytes, kind=Kind.TEMPORARY, dtype=dtype, shape=(size_bytes,))
        for name, size_bytes in (("input", input_bytes), ("output", output_bytes))
    )
    operation = Operation(name="op", target="op", phase=Phase.FORWARD, inputs=(0,), outputs=(1,), flops=flops)
    graph = Graph(storages=storages, operations=(operation,), resident=(0,), tangents=(), held=(1,))
    return estimated_time_us(graph, operation, DEVICE)


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
