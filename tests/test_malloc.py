import platform
import subprocess
import sys

import pytest

import memfit

_JOB = """
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


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_kept_memory_is_found_again_without_page_faults() -> None:
    counts = {}
    for way in ("plain", "kept"):
        done = subprocess.run([sys.executable, "-c", _JOB, way], env={}, capture_output=True, text=True, check=True)
        counts[way] = int(done.stdout)
    assert counts["kept"] < counts["plain"] / 20


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert memfit.keep_freed_memory() is False
