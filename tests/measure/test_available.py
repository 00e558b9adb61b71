import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from memfit.measure.available import Available, available

HOST_BYTES = 64 * 2**30
UNLIMITED_1 = 9223372036854771712  # as version 1 of cgroups writes it


@dataclasses.dataclass
class Kernel:
    """A kernel that shows itself in two folders."""

    proc: Path
    cgroups: Path

    def write(self, path: str, text: str) -> None:
        file = (self.proc if path.startswith("self/") else self.cgroups) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def cgroup(self, folder: str, **files: object) -> None:
        for name, content in files.items():
            self.write(f"{folder}/memory.{name}", f"{content}\n")

    def limits(self, *, data: object = "unlimited", address_space: object = "unlimited") -> None:
        lines = [
            "Limit                     Soft Limit           Hard Limit           Units     ",
            f"Max data size             {data!s:<20} unlimited            bytes     ",
            f"Max address space         {address_space!s:<20} unlimited            bytes     ",
        ]
        self.write("self/limits", "\n".join(lines))
        self.write("self/status", "Name:\tpython\nVmSize:\t    2000 kB\nVmData:\t    1000 kB\n")

    def available(self) -> Available:
        return available("cpu", proc=self.proc, cgroups=self.cgroups)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=HOST_BYTES))
    return Kernel(tmp_path / "proc", tmp_path / "cgroup")


def test_without_any_limit_the_host_is_the_limit(kernel: Kernel) -> None:
    assert kernel.available() == Available(free_bytes=HOST_BYTES, limit="host", parts={"host": HOST_BYTES})


def test_a_cgroup_of_version_2_counts_its_reclaimable_cache_as_free(kernel: Kernel) -> None:
    kernel.write("self/cgroup", "0::/job\n")
    kernel.cgroup("job", max=1000, current=700, stat="anon 500\ninactive_file 150\nactive_file 50")
    found = kernel.available()
    assert (found.free_bytes, found.limit) == (450, "cgroup")
    assert found.parts == {"host": HOST_BYTES, "cgroup": 450}


def test_a_cgroup_above_may_be_tighter(kernel: Kernel) -> None:
    kernel.write("self/cgroup", "0::/slice/job\n")
    kernel.cgroup("slice/job", max=1000, current=100, stat="inactive_file 0")
    kernel.cgroup("slice", max=2000, current=1900, stat="inactive_file 20")
    kernel.cgroup(".", current=5000)  # the root has no limit
    assert kernel.available().free_bytes == 120


def test_memory_high_counts_where_it_is_lower(kernel: Kernel) -> None:
    kernel.write("self/cgroup", "0::/job\n")
    kernel.cgroup("job", max=1000, high=600, current=100)
    assert kernel.available().free_bytes == 500
    kernel.cgroup("job", max=1000, high="max", current=100)
    assert kernel.available().free_bytes == 900


def test_max_is_no_limit(kernel: Kernel) -> None:
    kernel.write("self/cgroup", "0::/job\n")
    kernel.cgroup("job", max="max", high="max", current=100)
    assert kernel.available().limit == "host"


def test_version_2_may_be_mounted_beside_version_1(kernel: Kernel) -> None:
    kernel.write("self/cgroup", "4:memory:/old\n0::/new\n")
    kernel.cgroup("unified/new", max=900, current=100)
    kernel.cgroup("memory/old", limit_in_bytes=UNLIMITED_1, usage_in_bytes=50)
    assert kernel.available().free_bytes == 800


def test_a_cgroup_of_version_1(kernel: Kernel) -> None:
    kernel.write("self/cgroup", "12:cpu,cpuacct:/\n4:hugetlb,memory:/job\n0::/\n")
    kernel.cgroup("memory/job", limit_in_bytes=1000, usage_in_bytes=700, stat="inactive_file 1\ntotal_inactive_file 30")
    kernel.cgroup("memory", limit_in_bytes=UNLIMITED_1, usage_in_bytes=9000)
    assert kernel.available() == Available(free_bytes=330, limit="cgroup", parts={"host": HOST_BYTES, "cgroup": 330})


def test_the_limit_of_a_hierarchy_that_is_not_visible_counts_in_version_1(kernel: Kernel) -> None:
    kernel.write("self/cgroup", "4:memory:/job\n")
    kernel.cgroup(
        "memory/job", limit_in_bytes=UNLIMITED_1, usage_in_bytes=700, stat="hierarchical_memory_limit 800\nrss 600"
    )
    assert kernel.available().free_bytes == 100


def test_in_a_container_the_root_of_the_mount_is_the_own_cgroup(kernel: Kernel) -> None:
    kernel.write("self/cgroup", "0::/docker/0123abc\n")
    kernel.cgroup(".", max=1000, current=400)
    assert kernel.available().free_bytes == 600


def test_resource_limits_are_less_what_is_taken(kernel: Kernel) -> None:
    kernel.limits(data=4_000_000)
    assert kernel.available().parts["RLIMIT_DATA"] == 4_000_000 - 1000 * 1024
    assert kernel.available().limit == "RLIMIT_DATA"
    kernel.limits(address_space=5_000_000)
    found = kernel.available()
    assert (found.limit, found.free_bytes) == ("RLIMIT_AS", 5_000_000 - 2000 * 1024)
    assert "RLIMIT_DATA" not in found.parts


def test_more_taken_than_allowed_leaves_nothing(kernel: Kernel) -> None:
    kernel.limits(data=1)
    assert kernel.available().free_bytes == 0


@pytest.mark.parametrize("text", ["", "much", "-5", "1 2", "\0\0", "1e9"])
def test_what_cannot_be_understood_sets_no_limit(kernel: Kernel, text: str) -> None:
    kernel.write("self/cgroup", "0::/job\n4:memory:/job\nnonsense\n::\n")
    kernel.cgroup("job", max=text, high=text, current=text, stat=text)
    kernel.cgroup("memory/job", limit_in_bytes=text, usage_in_bytes=text, stat=text)
    kernel.limits(data=f"?{text}", address_space=f"?{text}")
    assert kernel.available().limit == "host"


def test_a_limit_without_its_usage_sets_none(kernel: Kernel) -> None:
    kernel.write("self/cgroup", "0::/job\n4:memory:/job\n")
    kernel.cgroup("job", max=1000)
    kernel.cgroup("memory/job", limit_in_bytes=1000)
    assert kernel.available().limit == "host"


def test_a_path_does_not_lead_out_of_the_mount(kernel: Kernel) -> None:
    kernel.write("self/cgroup", "0::/../../job\n")
    kernel.cgroup("job", max=1000, current=400)
    assert kernel.available().free_bytes == 600


def test_this_machine_can_be_read_in_no_time() -> None:
    assert available().free_bytes > 0
    start = time.perf_counter()
    for _ in range(10):
        available("cpu")
    assert time.perf_counter() - start < 0.2


def test_a_cuda_device_counts_what_its_allocator_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"reserved_bytes.all.current": 700, "allocated_bytes.all.current": 300}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ({1: 5000}[device.index], 9000))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {1: held}[device.index])
    assert available("cuda:1") == Available(free_bytes=5400, limit="device", parts={"device": 5400})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert available(torch.device("cuda")).free_bytes == 5400
