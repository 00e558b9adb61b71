"""Segments that grow page by page."""

from memfit.plan.allocator.caching import CachingAllocator
from memfit.plan.allocator.device import DeviceMemory
from memfit.plan.allocator.settings import AllocatorSettings

MIB = 2**20


def make(capacity_bytes=None):
    return CachingAllocator(AllocatorSettings(expandable_segments=True), DeviceMemory(capacity_bytes))


def test_only_the_pages_that_are_missing_are_mapped():
    allocator = make()
    first = allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    second = allocator.allocate(25 * MIB)  # 10 MiB are there, one more page of 20
    assert second == first + 30 * MIB
    assert allocator.reserved_bytes == 60 * MIB
    assert allocator.allocated_bytes == 55 * MIB


def test_small_and_large_requests_have_ranges_and_pages_of_their_own():
    allocator = make()
    small, large = allocator.allocate(512), allocator.allocate(2 * MIB)
    assert abs(large - small) > 2**30
    assert allocator.reserved_bytes == 22 * MIB


def test_freed_neighbours_serve_a_larger_request_without_new_pages():
    allocator = make()
    parts = [allocator.allocate(10 * MIB) for _ in range(4)]
    for address in parts:
        allocator.free(address)
    assert allocator.allocate(40 * MIB) == parts[0]
    assert allocator.reserved_bytes == 40 * MIB


def test_a_block_that_could_grow_is_left_for_requests_that_need_it():
    allocator = make()
    inner, _, last = allocator.allocate(12 * MIB), allocator.allocate(8 * MIB), allocator.allocate(10 * MIB)
    allocator.free(inner)
    allocator.free(last)  # merges with the rest of the mapped pages: 20 MiB that can grow
    assert allocator.allocate(11 * MIB) == inner
    assert allocator.allocate(19 * MIB) == last


def test_empty_cache_unmaps_whole_pages_only():
    allocator = make()
    first, kept = allocator.allocate(30 * MIB), allocator.allocate(5 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB  # the page that `kept` lies in
    assert allocator.allocate(10 * MIB) == first + 20 * MIB  # what was left of that page
    assert allocator.allocate(20 * MIB) == first  # and the addresses before are mapped again
    allocator.free(kept)
    assert allocator.reserved_bytes == 40 * MIB


def test_where_the_device_is_full_cached_pages_of_other_pools_are_given_back():
    allocator = make(capacity_bytes=44 * MIB)
    small = [allocator.allocate(MIB) for _ in range(6)]
    for address in small:
        allocator.free(address)
    assert allocator.reserved_bytes == 6 * MIB
    allocator.allocate(40 * MIB)
    assert allocator.retries == 1
    assert allocator.reserved_bytes == 40 * MIB
