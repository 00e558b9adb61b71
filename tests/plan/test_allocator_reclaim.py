"""What goes back to the device, and when."""

import pytest

from memfit.plan.allocator.caching import CachingAllocator, OutOfDeviceMemory
from memfit.plan.allocator.device import DeviceMemory
from memfit.plan.allocator.settings import AllocatorSettings

MIB = 2**20


def make(settings="", capacity_bytes=None):
    return CachingAllocator(AllocatorSettings.parse(settings), DeviceMemory(capacity_bytes))


def test_empty_cache_gives_whole_segments_back_large_ones_first_by_size():
    allocator = make()
    big, bigger, small = allocator.allocate(12 * MIB), allocator.allocate(30 * MIB), allocator.allocate(512)
    partly, rest = allocator.allocate(MIB + 512), allocator.allocate(2 * MIB)
    for address in (bigger, big, small, partly):
        allocator.free(address)
    assert allocator.empty_cache() == [(big, 12 * MIB), (bigger, 30 * MIB), (small, 2 * MIB)]
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(rest)
    assert allocator.empty_cache() == [(partly, 20 * MIB)]


def test_a_request_that_the_device_refuses_is_served_after_cached_memory_went_back():
    allocator = make(capacity_bytes=64 * MIB)
    one, two = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB)
    allocator.free(one)
    allocator.free(two)
    allocator.allocate(60 * MIB)
    assert (allocator.retries, allocator.reserved_bytes) == (1, 60 * MIB)


def test_a_retry_waits_for_other_streams():
    allocator = make(capacity_bytes=32 * MIB)
    address = allocator.allocate(30 * MIB)
    allocator.record_stream(address, 3)
    allocator.free(address)
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_a_fraction_of_the_device_is_a_limit():
    allocator = make("per_process_memory_fraction:0.5", capacity_bytes=64 * MIB)
    allocator.allocate(20 * MIB)
    with pytest.raises(OutOfDeviceMemory):
        allocator.allocate(20 * MIB)


def test_with_a_limit_of_splitting_one_oversize_block_goes_before_everything_does():
    allocator = make("max_split_size_mb:32", capacity_bytes=128 * MIB)
    big, small = allocator.allocate(70 * MIB), allocator.allocate(30 * MIB)
    allocator.free(big)
    allocator.free(small)
    allocator.allocate(44 * MIB)
    assert allocator.retries == 0
    assert allocator.reserved_bytes == (44 + 30) * MIB


def test_with_a_limit_of_splitting_the_largest_go_until_they_are_enough():
    allocator = make("max_split_size_mb:32", capacity_bytes=128 * MIB)
    kept = [allocator.allocate(size * MIB) for size in (34, 36, 40)]
    for address in kept:
        allocator.free(address)
    allocator.allocate(76 * MIB)
    assert allocator.retries == 0
    assert allocator.reserved_bytes == (34 + 76) * MIB


def test_garbage_collection_releases_what_was_unused_longest():
    allocator = make("garbage_collection_threshold:0.5,per_process_memory_fraction:1.0", capacity_bytes=100 * MIB)
    old, young, busy = (allocator.allocate(size * MIB) for size in (30, 24, 12))
    allocator.free(old)
    allocator.free(busy)
    for _ in range(4):
        allocator.free(allocator.allocate(12 * MIB))
    allocator.free(young)
    allocator.allocate(40 * MIB)
    assert old not in allocator.segments
    assert young in allocator.segments
    assert allocator.retries == 0


def test_garbage_is_not_collected_below_the_threshold_or_without_a_limit():
    for settings in (
        "garbage_collection_threshold:0.9,per_process_memory_fraction:1.0",
        "garbage_collection_threshold:0.1",
    ):
        allocator = make(settings, capacity_bytes=100 * MIB)
        address = allocator.allocate(30 * MIB)
        allocator.free(address)
        allocator.allocate(40 * MIB)
        assert address in allocator.segments
