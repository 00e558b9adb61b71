"""The allocator by itself: rounding, pools, best fit, splitting, merging, streams, and what it never does."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.plan.allocator.caching import CachingAllocator, OutOfDeviceMemory
from memfit.plan.allocator.device import DeviceMemory
from memfit.plan.allocator.settings import AllocatorSettings
from memfit.plan.allocator.sizes import round_request, segment_bytes

MIB = 2**20
DEFAULT = AllocatorSettings()


def make(settings="", capacity_bytes=None):
    return CachingAllocator(AllocatorSettings.parse(settings), DeviceMemory(capacity_bytes))


@pytest.mark.parametrize(
    ("settings", "size", "rounded"),
    [
        ("", 1, 512),
        ("", 513, 1024),
        ("roundup_power2_divisions:4", 1200, 1536),  # below 512 * 4 nothing is divided
        ("roundup_power2_divisions:4", 1200 * 1024, 1280 * 1024),
        ("roundup_power2_divisions:4", 1024 * 1024, 1024 * 1024),
        ("roundup_power2_divisions:[1:0,>:4]", 5 * MIB // 4, 5 * MIB // 4),
        ("roundup_power2_divisions:[1:0,2:4,>:4]", 9 * MIB, 10 * MIB),
    ],
)
def test_requests_are_rounded(settings, size, rounded):
    assert round_request(size, AllocatorSettings.parse(settings)) == rounded


def test_segments_grow_with_requests():
    sizes = [512, MIB, MIB + 512, 10 * MIB - 512, 10 * MIB, 10 * MIB + 512]
    assert [segment_bytes(each, DEFAULT) // MIB for each in sizes] == [2, 2, 20, 20, 10, 12]


def test_small_requests_share_a_segment_and_the_lowest_addresses_come_first():
    allocator = make()
    first, second = allocator.allocate(1000), allocator.allocate(100)
    assert second == first + 1024
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (1536, 2 * MIB)


def test_the_smallest_block_that_fits_is_taken_then_the_lowest():
    allocator = make()
    kept = [allocator.allocate(size) for size in (4096, 512, 2048, 512, 2048, 512)]
    for address in kept[::2]:
        allocator.free(address)
    assert allocator.allocate(2000) == kept[2]
    assert allocator.allocate(2000) == kept[4]
    assert allocator.allocate(2000) == kept[0]


def test_a_large_block_is_not_split_for_up_to_one_mebibyte_and_counts_whole():
    allocator = make()
    address = allocator.allocate(21 * MIB)
    assert allocator.allocated_bytes == allocator.reserved_bytes == 22 * MIB
    allocator.free(address)
    assert allocator.allocate(21 * MIB - 512) == address
    assert allocator.allocated_bytes == 21 * MIB - 512  # more than one is left, so it was split


def test_neighbours_merge_inside_a_segment_and_never_across():
    allocator = make()
    one, two = allocator.allocate(12 * MIB), allocator.allocate(12 * MIB)
    for address in (one, two):
        allocator.free(address)
    assert len(allocator.segments) == 2
    assert allocator.allocate(24 * MIB) not in (one, two)
    parts = [allocator.allocate(6 * MIB), allocator.allocate(6 * MIB)]
    assert parts == [one, one + 6 * MIB]
    for address in parts:
        allocator.free(address)
    assert allocator.allocate(12 * MIB) == one


def test_a_stream_reuses_only_its_own_blocks():
    allocator = make()
    address = allocator.allocate(4096, stream=1)
    allocator.free(address)
    assert allocator.allocate(4096, stream=2) != address
    assert allocator.allocate(4096, stream=1) == address


def test_a_block_that_another_stream_uses_is_neither_allocated_nor_free():
    allocator = make()
    address = allocator.allocate(4096)
    allocator.record_stream(address, 7)
    allocator.free(address)
    assert allocator.allocated_bytes == 0
    assert allocator.allocate(4096) != address
    allocator.finish_streams()
    assert allocator.allocate(4096) == address


def test_use_on_the_own_stream_delays_nothing():
    allocator = make()
    address = allocator.allocate(4096)
    allocator.record_stream(address, 0)
    allocator.free(address)
    assert allocator.allocate(4096) == address


def test_blocks_above_the_limit_of_splitting_are_kept_for_requests_of_their_size():
    allocator = make("max_split_size_mb:32")
    big = allocator.allocate(64 * MIB)
    allocator.free(big)
    assert allocator.allocate(8 * MIB) != big  # below the limit: not from an oversize block
    assert allocator.allocate(40 * MIB) != big  # 24 MiB too large
    assert allocator.allocate(50 * MIB) == big
    assert allocator.allocated_bytes == (8 + 40 + 64) * MIB


def test_the_device_refuses_beyond_its_capacity_and_says_the_segment_it_was_asked_for():
    allocator = make(capacity_bytes=40 * MIB)
    allocator.allocate(30 * MIB)
    with pytest.raises(OutOfDeviceMemory) as caught:
        allocator.allocate(5 * MIB)
    assert caught.value.segment_bytes == 20 * MIB


SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:21",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.9",
)
SIZES = st.sampled_from([1, 513, 70_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 15 * MIB, 33 * MIB])


@given(st.sampled_from(SETTINGS), st.lists(st.tuples(SIZES, st.integers(0, 1), st.integers(0, 5)), max_size=60))
def test_blocks_never_overlap_and_everything_reserved_is_accounted_for(settings, actions):
    allocator = make(settings, capacity_bytes=256 * MIB)
    live = []
    for size_bytes, stream, choice in actions:
        if choice < 2 and live:
            allocator.free(live.pop(choice % len(live)))
        elif choice == 5:
            allocator.empty_cache()
        else:
            try:
                live.append(allocator.allocate(size_bytes, stream))
            except OutOfDeviceMemory:
                continue
        check(allocator)


def check(allocator):
    pools = (allocator.small, allocator.large)
    free = [block for pool in pools for block in pool.free_blocks()]
    blocks = sorted([*allocator.blocks.values(), *free], key=lambda block: block.address)
    for one, other in itertools.pairwise(blocks):
        assert one.address + one.size_bytes <= other.address
        assert not (one.next is other and one.is_idle and other.is_idle)
    assert sum(each.size_bytes for each in blocks) == allocator.reserved_bytes == allocator.device.used_bytes
    assert sum(each.size_bytes for each in allocator.blocks.values()) == allocator.allocated_bytes
    assert allocator.reserved_bytes <= allocator.peak_reserved_bytes <= allocator.device.capacity_bytes
