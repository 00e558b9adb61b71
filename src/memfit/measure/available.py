"""How much memory this process can still take, and what limits it.

Note [Limits of a process]
    On a CPU several limits hold at once and the tightest one counts: what the host has available, the memory cgroup
    of the process and every cgroup above it (version 2 and version 1), `RLIMIT_DATA` and `RLIMIT_AS`. Page cache that
    the kernel can drop (`inactive_file`) counts as free in a cgroup, as it does on the host. `memory.high` of a
    cgroup counts as its limit where it is below `memory.max`: the kernel does not kill a process above it, but it
    throttles the process until it hardly moves. Swap is not counted: a training step that swaps does not finish.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import torch

from memfit import accelerator

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 2**62  # cgroup version 1 writes the largest multiple of a page when there is no limit

DEVICE, HOST, CGROUP, DATA, ADDRESS_SPACE = "device", "host", "cgroup", "RLIMIT_DATA", "RLIMIT_AS"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Available:
    """The memory a process can still take on one device."""

    free_bytes: int
    limit: str  # what leaves the least: "device", "host", "cgroup", "RLIMIT_DATA" or "RLIMIT_AS"
    parts: Mapping[str, int]  # free bytes by limit, of every limit that was found; `free_bytes` is their minimum


def available(device: str | torch.device = "cpu", *, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Available:
    """Read how much memory `device` has left for this process, see Note [Limits of a process].

    Reading changes nothing and takes less than a millisecond on a CPU. Files that are missing or cannot be understood
    set no limit. `proc` and `cgroups` are where the kernel shows itself.
    """
    place = torch.device(device)
    is_own = accelerator.is_accelerator(place)
    parts = {DEVICE: accelerator.free_bytes(place)} if is_own else _free_on_host(proc, cgroups)
    limit = min(parts, key=lambda name: parts[name])
    return Available(free_bytes=parts[limit], limit=limit, parts=parts)


def _free_on_host(proc: Path, cgroups: Path) -> dict[str, int]:
    found = {
        HOST: int(psutil.virtual_memory().available),
        CGROUP: min((*_free_in_version_2(proc, cgroups), *_free_in_version_1(proc, cgroups)), default=None),
        **_free_under_resource_limits(proc),
    }
    return {name: max(0, free_bytes) for name, free_bytes in found.items() if free_bytes is not None}


def _free_in_version_2(proc: Path, cgroups: Path) -> Iterator[int]:
    for mounted in (cgroups, cgroups / "unified"):  # the second where both versions are in use
        for folder in _from_own_to_root(mounted, _own_cgroup(proc, "")):
            limits = [_bytes_in(folder / name) for name in ("memory.max", "memory.high")]
            usage_bytes = _bytes_in(folder / "memory.current")
            found = [each for each in limits if each is not None]
            if found and usage_bytes is not None:
                yield min(found) - usage_bytes + _fields(folder / "memory.stat").get("inactive_file", 0)


def _free_in_version_1(proc: Path, cgroups: Path) -> Iterator[int]:
    for folder in _from_own_to_root(cgroups / "memory", _own_cgroup(proc, "memory")):
        fields = _fields(folder / "memory.stat")
        limits = [_bytes_in(folder / "memory.limit_in_bytes"), fields.get("hierarchical_memory_limit")]
        usage_bytes = _bytes_in(folder / "memory.usage_in_bytes")
        found = [each for each in limits if each is not None and each < _NO_LIMIT_BYTES]
        if found and usage_bytes is not None:
            yield min(found) - usage_bytes + fields.get("total_inactive_file", 0)


def _own_cgroup(proc: Path, controller: str) -> str | None:
    """Return the path of this process's cgroup; the only one of version 2 has no controllers beside its name."""
    for line in _lines(proc / "self" / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and controller in controllers.split(","):
            return path
    return None


def _from_own_to_root(mounted: Path, path: str | None) -> Iterator[Path]:
    """Yield the folders of a cgroup and of all above it.

    In a container the path may be one of the host's, of which only the end is mounted here: folders that do not exist
    are passed over, and the root of the mount is the container's own cgroup.
    """
    if path is None:
        return
    names = [name for name in path.split("/") if name not in ("", ".", "..")]
    for depth in range(len(names), -1, -1):
        folder = mounted.joinpath(*names[:depth])
        if folder.is_dir():
            yield folder


def _free_under_resource_limits(proc: Path) -> dict[str, int | None]:
    used = _fields(proc / "self" / "status", unit_bytes=1024)
    limits = _resource_limits(proc)

    def free_bytes(limit: str, use: str) -> int | None:
        return limits[limit] - used[use] if limit in limits and use in used else None

    return {DATA: free_bytes("Max data size", "VmData:"), ADDRESS_SPACE: free_bytes("Max address space", "VmSize:")}


def _resource_limits(proc: Path) -> dict[str, int]:
    """Read the soft limits that are set, by the kernel's names."""
    found = {}
    for line in _lines(proc / "self" / "limits"):
        for name in ("Max data size", "Max address space"):
            soft = line.removeprefix(name).split()[:1] if line.startswith(name) else []
            if soft and soft[0].isdecimal():
                found[name] = int(soft[0])
    return found


def _bytes_in(path: Path) -> int | None:
    """Read a file that holds one number; "max" means that there is no limit."""
    words = [word for line in _lines(path) for word in line.split()]
    return int(words[0]) if len(words) == 1 and words[0].isdecimal() else None


def _fields(path: Path, unit_bytes: int = 1) -> dict[str, int]:
    """Read a file of lines that are a name and a number, in units of `unit_bytes`."""
    rows = [line.split() for line in _lines(path)]
    return {row[0]: int(row[1]) * unit_bytes for row in rows if len(row) > 1 and row[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
