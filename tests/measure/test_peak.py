import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memfit._memory_events import _released_elsewhere, _Seen
from memfit.measure.peak import PeakWatch, held_bytes, measure_peak

KIB = 1024


def kib(count: int) -> torch.Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8)


def test_the_peak_of_a_known_pattern_is_exact() -> None:
    def run() -> None:
        first = kib(100)
        second = kib(30)
        del first
        third = kib(50)
        del second, third

    measured = measure_peak(run, resident=[])
    assert measured.peak_bytes == 130 * KIB
    assert [size // KIB for size in measured.live_bytes] == [0, 100, 130, 30, 80, 50, 0]


def test_what_an_operator_allocates_inside_counts() -> None:
    values = torch.rand(1000)
    measured = measure_peak(lambda: values.sort(), resident=[values])
    assert measured.peak_bytes >= values.nbytes + 1000 * 4 + 1000 * 8


def test_what_is_resident_counts_towards_the_peak() -> None:
    batch = kib(7)
    measured = measure_peak(lambda: kib(3), resident=[batch])
    assert (measured.resident_bytes, measured.peak_bytes) == (7 * KIB, 10 * KIB)


def test_what_a_run_frees_makes_room_for_what_it_allocates() -> None:
    held = [kib(5)]

    def run() -> None:
        held.clear()
        held.append(kib(5))

    assert measure_peak(run, resident=held).peak_bytes == 5 * KIB


def test_what_was_there_before_counts_until_its_last_view_is_gone() -> None:
    held = [kib(5)]
    held.append(held[0][:KIB])

    def run() -> None:
        held.pop(0)
        kib(1)
        held.clear()

    measured = measure_peak(run, resident=held)
    assert [size // KIB for size in measured.live_bytes] == [5, 6, 5, 0]


def test_a_storage_that_is_given_twice_is_released_once() -> None:
    held = [kib(5)]
    holders = [held, {"again": held[0].view(5, KIB)}]

    def run() -> None:
        held.clear()
        holders.clear()
        held.append(kib(2))

    measured = measure_peak(run, resident=holders)
    assert [size // KIB for size in measured.live_bytes] == [5, 0, 2]


def test_what_a_backward_pass_lets_go_of_makes_room() -> None:
    weight = torch.ones(KIB, requires_grad=True)
    graph = [(weight.exp() * 2).sum()]  # the result of exp is saved for its backward pass, and nobody else holds it
    saved = [graph[0].grad_fn.next_functions[0][0].next_functions[0][0]._saved_result]  # type: ignore[union-attr]

    def run() -> None:
        saved.clear()
        graph[0].backward()
        graph.clear()

    measured = measure_peak(run, resident=[weight, saved, graph])
    assert measured.resident_bytes == 8 * KIB + 4
    assert measured.live_bytes[-1] == 8 * KIB, "the weight and its gradient"


def test_what_another_thread_releases_makes_room() -> None:
    held = [kib(5)]

    def run() -> None:
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        held.append(kib(5))

    assert measure_peak(run, resident=held).peak_bytes == 5 * KIB


def test_parameters_that_are_replaced_do_not_count_twice() -> None:
    layer = nn.Linear(KIB, 1, bias=False)

    def run() -> None:
        layer.weight.data = torch.zeros_like(layer.weight)
        layer.weight.data = torch.zeros_like(layer.weight)

    measured = measure_peak(run, resident=[layer])
    assert [size // KIB for size in measured.live_bytes] == [4, 8, 4, 8, 4]


def test_what_an_earlier_recording_allocated_is_no_release_of_this_one() -> None:
    held: list[torch.Tensor] = []
    measure_peak(lambda: held.append(kib(5)), resident=[])
    assert measure_peak(held.clear, resident=[]).live_bytes == (0,)
    measure_peak(lambda: held.append(kib(5)), resident=[])
    assert measure_peak(held.clear, resident=held).live_bytes == (5 * KIB, 0)


def test_nothing_is_printed_about_what_was_there_before(capfd: pytest.CaptureFixture[str]) -> None:
    held = [kib(1) for _ in range(2000)]  # the profiler tells of every thousandth
    measure_peak(held.clear, resident=[])
    assert "unknown size" not in capfd.readouterr().err


def test_a_watch_sees_releases_too() -> None:
    held = [kib(5)]
    watch = PeakWatch()
    watch.start(resident=held)
    held.clear()
    held.append(kib(5))
    measured = watch.stop()
    assert measured is not None
    assert measured.peak_bytes == 5 * KIB


def test_the_run_happens_once() -> None:
    calls: list[int] = []
    measure_peak(lambda: calls.append(1), resident=[])
    assert calls == [1]


def test_shared_storages_count_once() -> None:
    whole = torch.zeros(100)
    assert held_bytes([whole, whole[:10], whole.view(10, 10), {"again": [whole]}]) == 400


def test_a_view_holds_its_whole_storage() -> None:
    assert held_bytes([torch.zeros(100)[:1]]) == 400


def test_tied_parameters_and_buffers_of_modules_count_once() -> None:
    layer = nn.Linear(4, 4, bias=False)
    twin = nn.Linear(4, 4, bias=False)
    twin.weight = layer.weight
    assert held_bytes([nn.Sequential(layer, twin, nn.BatchNorm1d(4))]) == 64 + 4 * 16 + 8


def test_gradients_are_not_resident() -> None:
    layer = nn.Linear(4, 4)
    layer(torch.ones(4)).sum().backward()
    assert held_bytes([layer]) == 80


def test_the_state_of_an_optimizer_counts() -> None:
    weight = nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    assert held_bytes([optimizer]) == 0
    weight.grad = torch.ones(100)
    optimizer.step()
    assert held_bytes([optimizer]) == 400


def test_containers_without_tensors_are_empty() -> None:
    assert held_bytes([3, "text", None, [], {"a": ()}]) == 0


def event(name: str, start: int, end: int, *children: Any) -> Any:
    return SimpleNamespace(name=name, tag=None, start_time_ns=start, end_time_ns=end, children=list(children))


def change(time: int, address: int, size_bytes: int) -> Any:
    return SimpleNamespace(
        name="[memory]",
        tag=torch._C._profiler._EventType.Allocation,
        start_time_ns=time,
        extra_fields=SimpleNamespace(ptr=address, alloc_size=size_bytes, device=torch.device("cpu")),
        children=[],
    )


def test_a_copy_of_a_collective_that_its_backend_releases_counts_until_the_collective_returns() -> None:
    events = [
        event("c10d::_reduce_scatter_base_", 10, 20, change(12, 1, 100)),
        event("c10d::_reduce_scatter_base_", 50, 60, change(52, 2, 100)),
        change(80, 2, -100),  # this one was seen
    ]
    seen = _Seen.of(events)
    assert _released_elsewhere(seen, seen.changes["cpu", 0]) == [(20, "", -100)]


def test_what_was_released_unseen_is_gone_when_its_place_is_taken() -> None:
    changes = [change(1, 7, 40), change(9, 7, 60), change(20, 7, -60)]
    seen = _Seen.of(changes)
    assert _released_elsewhere(seen, seen.changes["cpu", 0]) == [(8, "", -40)]


def test_a_measurement_inside_another_is_seen_by_both() -> None:
    kept: list[torch.Tensor] = []
    inner: list[int] = []

    def run() -> None:
        kept.append(torch.zeros(2**20, dtype=torch.uint8))
        inner.append(measure_peak(lambda: torch.zeros(2**18, dtype=torch.uint8), resident=[]).peak_bytes)
        kept.clear()  # allocated before the inner measurement, released after it
        kept.append(torch.zeros(2**19, dtype=torch.uint8))

    outer = measure_peak(run, resident=[])
    assert inner == [2**18]
    assert outer.peak_bytes == 2**20 + 2**18
    assert outer.live_bytes[-1] == 2**19
