import os
import platform
import subprocess
import sys

import pytest

import memfit

_FAULTS = """
import resource, sys, torch, memfit
if sys.argv[1] == "kept":
    assert memfit.keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    torch.ones(2**24)
before = faults()
for _ in range(3):
    torch.ones(2**24)  # 64 MiB
print(faults() - before)
"""

_RESIDENT = """
import sys, torch, memfit
assert getattr(memfit, sys.argv[1])()
def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident_bytes()
for size in (2**23, 2**22):  # the threshold of glibc as it comes rises to 32 MB here
    torch.ones(size)
tensors = [torch.ones(2**20) for _ in range(64)]  # 4 MiB each
tensors = tensors[::2]  # every second one leaves a hole
print(resident_bytes() - before)
"""

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


def _printed(job: str, argument: str) -> int:
    plain = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", job, argument], env=plain, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@needs_glibc
def test_kept_memory_is_found_again_without_page_faults() -> None:
    assert _printed(_FAULTS, "kept") < _printed(_FAULTS, "plain") / 20


@pytest.mark.slow
@needs_glibc
def test_released_memory_leaves_the_process_at_once() -> None:
    live_bytes = 32 * 4 * 2**20
    assert _printed(_RESIDENT, "release_freed_memory") < live_bytes + 32 * 2**20
    assert _printed(_RESIDENT, "keep_freed_memory") > 2 * live_bytes - 32 * 2**20


@pytest.mark.parametrize("function", [memfit.keep_freed_memory, memfit.release_freed_memory])
def test_other_libraries_are_left_alone(function: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert callable(function)
    assert function() is False
