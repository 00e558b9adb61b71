"""Settings of the caching allocator, read from the syntax of `PYTORCH_CUDA_ALLOC_CONF`."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, Self

from memfit.errors import InvalidInput

_MIB = 2**20
_INTERVALS = 16  # sizes by powers of two, from 1 MiB to 32 GiB and above
_SMALLEST_SPLIT_MB = 20  # torch refuses limits of splitting that are not above
_TOKEN = re.compile(r"\s*([^\s:,\[\]]+|[:,\[\]])")
# Known to torch, without an effect on where blocks land.
_WITHOUT_EFFECT = frozenset(
    {
        *("pinned_use_cuda_host_register", "pinned_num_register_threads", "pinned_use_background_threads"),
        *("pinned_reserve_segment_size_mb", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc"),
        *("pinned_use_hip_host_register", "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom"),
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """What decides how the allocator rounds, splits, grows and gives back."""

    expandable_segments: bool = False
    max_split_bytes: int | None = None  # blocks of this size and above are never split; None: all are
    max_non_split_rounding_bytes: int = 20 * _MIB  # a bigger request may take a block larger by less than this
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS  # by interval of size; 0 or 1: none
    garbage_collection_threshold: float = 0.0  # share of the allowed memory; 0: never
    memory_fraction: float | None = None  # share of the device that may be reserved; None: not limited
    large_segment_bytes: int = 20 * _MIB  # segment of requests from 1 to 10 MiB, page of expandable segments

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `PYTORCH_CUDA_ALLOC_CONF` holds; a later value of an option replaces an earlier one.

        >>> AllocatorSettings.parse("expandable_segments:True").expandable_segments
        True
        >>> AllocatorSettings.parse("max_split_size_mb:128").max_split_bytes // 2**20
        128
        """
        fields: dict[str, Any] = {}
        for name, value in _options(text):
            fields |= _field(name, value)
        return cls(**fields)

    def __str__(self) -> str:
        """Write the settings as the environment variable takes them; "" for the defaults.

        >>> str(AllocatorSettings(expandable_segments=True, max_split_bytes=128 * 2**20))
        'expandable_segments:True,max_split_size_mb:128'
        """
        default = AllocatorSettings()
        names = (each.name for each in dataclasses.fields(self))
        return ",".join(_WRITTEN[name](getattr(self, name)) for name in names if _differs(self, default, name))


def _differs(one: AllocatorSettings, other: AllocatorSettings, name: str) -> bool:
    return bool(getattr(one, name) != getattr(other, name))


def _options(text: str) -> Iterator[tuple[str, str]]:
    """Split "a:1,b:[256:1,>:2]" into names and values; a list stays one value."""
    tokens = _tokens(text)
    position = 0
    while position < len(tokens):
        if tokens[position] == ",":  # torch takes a comma too many
            position += 1
            continue
        name = tokens[position]
        if position + 2 >= len(tokens) or tokens[position + 1] != ":" or name in ":[]":
            raise InvalidInput(f"allocator settings are written name:value,name:value; {text!r} is not, near {name!r}")
        end = position + 3
        if tokens[position + 2] == "[":
            end = next((at + 1 for at in range(end, len(tokens)) if tokens[at] == "]"), 0)
            if not end:
                raise InvalidInput(f"the list of {name!r} in the allocator settings {text!r} does not end; add ']'")
        yield name, "".join(tokens[position + 2 : end])
        position = end


def _tokens(text: str) -> list[str]:
    tokens, position = [], 0
    stripped = text.rstrip()
    while position < len(stripped):
        match = _TOKEN.match(stripped, position)
        assert match is not None  # any letter is a token
        tokens.append(match[1])
        position = match.end()
    return tokens


def _field(name: str, value: str) -> dict[str, Any]:
    if name == "backend":
        if value != "native":
            raise InvalidInput(
                f"the allocator {value!r} is CUDA's own and is not simulated; only backend:native is, the default"
            )
        return {}
    if name in _WITHOUT_EFFECT:
        return {}
    if name not in _READERS:
        known = ", ".join((*_READERS, "backend"))
        raise InvalidInput(f"the allocator setting {name!r} is not known; known are {known}")
    field, read = _READERS[name]
    try:
        return {field: read(value)}
    except ValueError as error:
        raise InvalidInput(f"the allocator setting {name}:{value} cannot be used: {error}") from None


def _flag(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError("it is True or False")
    return value.lower() == "true"


def _above_smallest_split(value: str) -> int:
    size_mb = int(value)
    if size_mb <= _SMALLEST_SPLIT_MB:
        raise ValueError(f"it must be more than {_SMALLEST_SPLIT_MB}")
    return size_mb * _MIB


def _segment(value: str) -> int:
    size_mb = int(value)
    if size_mb < _SMALLEST_SPLIT_MB or size_mb % 2:
        raise ValueError(f"it must be even, and {_SMALLEST_SPLIT_MB} or more")
    return size_mb * _MIB


def _threshold(value: str) -> float:
    share = float(value)
    if not 0 < share < 1:
        raise ValueError("it must be above 0 and below 1")
    return share


def _fraction(value: str) -> float:
    share = float(value)
    if not 0 <= share <= 1:
        raise ValueError("it must be from 0 to 1")
    return share


def _divisions(value: str) -> tuple[int, ...]:
    """Read one number for all sizes, or "[256:1,512:2,>:8]": by sizes in MiB, the last for all above.

    Sizes below the first that is named take its number; sizes between two that are named keep none.
    """
    if not value.startswith("["):
        return (_power_of_two(value, may_be_zero=False),) * _INTERVALS
    divisions = [0] * _INTERVALS
    last = None
    for entry in value[1:-1].split(","):
        key, _, number = entry.partition(":")
        count = _power_of_two(number, may_be_zero=True)
        if key == ">":
            divisions[last or 0 :] = [count] * (_INTERVALS - (last or 0))
            continue
        index = min(_power_of_two(key, may_be_zero=False).bit_length() - 1, _INTERVALS - 1)
        if last is None:
            divisions[:index] = [count] * index
        divisions[index] = count
        last = index
    return tuple(divisions)


def _power_of_two(text: str, *, may_be_zero: bool) -> int:
    number = int(text)
    if number == 0 and may_be_zero:
        return 0
    if number < 1 or number & (number - 1):
        raise ValueError(f"{text} is not a power of two")
    return number


def _write_divisions(divisions: tuple[int, ...]) -> str:
    if len(set(divisions)) == 1:
        return f"roundup_power2_divisions:{divisions[0]}"
    entries = ",".join(f"{2**index}:{count}" for index, count in enumerate(divisions))
    return f"roundup_power2_divisions:[{entries}]"


_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": ("expandable_segments", _flag),
    "max_split_size_mb": ("max_split_bytes", _above_smallest_split),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _above_smallest_split),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "per_process_memory_fraction": ("memory_fraction", _fraction),
    "large_segment_size_mb": ("large_segment_bytes", _segment),
}
_WRITTEN: dict[str, Callable[[Any], str]] = {
    "expandable_segments": lambda value: f"expandable_segments:{value}",
    "max_split_bytes": lambda value: f"max_split_size_mb:{value // _MIB}",
    "max_non_split_rounding_bytes": lambda value: f"max_non_split_rounding_mb:{value // _MIB}",
    "roundup_power2_divisions": _write_divisions,
    "garbage_collection_threshold": lambda value: f"garbage_collection_threshold:{value:g}",
    "memory_fraction": lambda value: f"per_process_memory_fraction:{value:g}",
    "large_segment_bytes": lambda value: f"large_segment_size_mb:{value // _MIB}",
}
