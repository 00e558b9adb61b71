"""Damage as disks, kills and editors do it."""

import random

_MOST_BYTES = 4096


def damaged(content: bytes, seed: int) -> bytes:
    """Return the content cut off, with bits turned over, a hole, more or fewer bytes, or nothing like it."""
    draw = random.Random(seed)
    place = draw.randrange(len(content))
    length = draw.randrange(1, _MOST_BYTES)
    before, after = content[:place], content[place:]
    kinds = (
        lambda: before,
        lambda: before + bytes([after[0] ^ 1 << draw.randrange(8)]) + after[1:],
        lambda: before + bytes(len(after[:length])) + after[length:],
        lambda: before + draw.randbytes(length) + after,
        lambda: before + after[length:],
        lambda: b"[" * draw.randrange(200_000),
    )
    return kinds[draw.randrange(len(kinds))]()
