"""Sizes: what a request is rounded to, and how big a segment it needs."""

from memfit.plan.allocator.settings import AllocatorSettings

MIN_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = 2**20  # up to here a request is served from the small pool
SMALL_SEGMENT_BYTES = 2 * 2**20
MIN_OWN_SEGMENT_BYTES = 10 * 2**20  # from here on a request has a segment of its size
SEGMENT_GRANULARITY_BYTES = 2 * 2**20
MAX_TAIL_BYTES = 2**20  # a block of the large pool is not split for a remainder up to this

_FIRST_INTERVAL_BITS = 20  # 1 MiB


def round_request(size_bytes: int, settings: AllocatorSettings) -> int:
    """Round a request up to the size that a block for it must have.

    >>> round_request(1, AllocatorSettings()), round_request(1025, AllocatorSettings())
    (512, 1536)
    >>> round_request(1200 * 2**10, AllocatorSettings.parse("roundup_power2_divisions:4")) // 2**10
    1280
    """
    if size_bytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    divisions = _divisions(size_bytes, settings)
    if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
        return _next_division(size_bytes, divisions)
    return -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def is_small(rounded_bytes: int) -> bool:
    """Tell which pool serves a request: blocks of the small pool and of the large one never mix."""
    return rounded_bytes <= SMALL_REQUEST_BYTES


def segment_bytes(rounded_bytes: int, settings: AllocatorSettings) -> int:
    """Size the segment that is asked from the device when no free block serves a request.

    >>> [segment_bytes(size * 2**20, AllocatorSettings()) // 2**20 for size in (1, 2, 11)]
    [2, 20, 12]
    """
    if rounded_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded_bytes < MIN_OWN_SEGMENT_BYTES:
        return settings.large_segment_bytes
    return -(-rounded_bytes // SEGMENT_GRANULARITY_BYTES) * SEGMENT_GRANULARITY_BYTES


def _divisions(size_bytes: int, settings: AllocatorSettings) -> int:
    interval = max(0, size_bytes.bit_length() - 1 - _FIRST_INTERVAL_BITS)
    return settings.roundup_power2_divisions[min(interval, len(settings.roundup_power2_divisions) - 1)]


def _next_division(size_bytes: int, divisions: int) -> int:
    """Round up to one of `divisions` equal steps between two powers of two."""
    floor = 1 << (size_bytes.bit_length() - 1)
    if size_bytes == floor:
        return size_bytes
    step = floor >> (divisions.bit_length() - 1)
    return -(-size_bytes // step) * step
