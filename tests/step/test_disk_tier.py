"""Optimizer state on disk: not in memory, not left behind, and clear about a disk that is full."""

import errno
import os
import resource
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from training import TiedNet, assert_same_parameters, classify, rows, train_plainly, twins

import memfit
from memfit.errors import ExecutionError, InvalidInput
from memfit.step.disk_tier import DiskTier
from memfit.step.host_tier import HostTier
from memfit.step.parts import PartUpdates
from memfit.step.tiers import TieredState

pytestmark = pytest.mark.usefixtures("one_thread")


def mapped_bytes(directory: Path) -> int:
    """Resident bytes of this process's mappings of files in a directory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            inside = str(directory) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def big():
    return nn.Sequential(nn.Linear(8, 4096), nn.ReLU(), nn.Linear(4096, 2048), nn.ReLU(), nn.Linear(2048, 4))


class LiveBuffers:
    """Follows the memory that state is read into until it is free."""

    def __init__(self) -> None:
        self.live_bytes = self.most_bytes = 0

    def make(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.empty(shape, dtype=dtype)
        self.live_bytes += buffer.nbytes
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        weakref.finalize(buffer.untyped_storage(), self._free, buffer.nbytes)
        return buffer

    def _free(self, size_bytes: int) -> None:
        self.live_bytes -= size_bytes


@pytest.mark.parametrize("update", ["after", "inside"])
def test_a_twentieth_of_the_state_is_in_memory(tmp_path, update, monkeypatch):
    """In a step (buffers) and after it (what the kernel says about the file)."""
    buffers = LiveBuffers()
    monkeypatch.setattr("memfit.step.parts.LARGEST_PART", 2**16)
    monkeypatch.setattr("memfit.step.disk_tier._buffer", buffers.make)
    model, batch = big(), rows()
    optimizer = torch.optim.AdamW(model.parameters())
    step = memfit.Step(model, optimizer, classify, update=update, state_tier="disk", directory=tmp_path)
    for _ in range(3):
        step(batch)
    state_bytes = 2 * sum(each.nbytes for each in model.parameters())
    assert 0 < buffers.most_bytes <= 0.05 * state_bytes
    assert mapped_bytes(tmp_path) <= 0.05 * state_bytes
    assert sum(each.nbytes for state in optimizer.state.values() for each in state.values()) >= state_bytes
    step.save(tmp_path / "run")
    step(batch)
    assert mapped_bytes(tmp_path) <= 0.05 * state_bytes
    assert [each.name for each in tmp_path.iterdir()] == ["run"]  # the state's own file has no name
    step.close()
    assert not optimizer.state


def test_the_first_update_reads_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("memfit.step.parts.LARGEST_PART", 2**16)
    buffers = LiveBuffers()
    monkeypatch.setattr("memfit.step.disk_tier._buffer", buffers.make)
    model = big()
    optimizer = torch.optim.AdamW(model.parameters())
    step = memfit.Step(model, optimizer, classify, update="inside", state_tier="disk", directory=tmp_path)
    step(rows())
    assert buffers.most_bytes == 0
    step(rows())
    assert buffers.most_bytes > 0


def test_state_dicts_read_through_and_load(tmp_path):
    plain, model = twins(TiedNet())
    batches = [rows() for _ in range(6)]
    expected, optimizer = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(model.parameters())
    train_plainly(plain, expected, classify, batches[:3])
    train_plainly(model, optimizer, classify, batches[:3])  # state in memory first
    step = memfit.Step(model, optimizer, classify, state_tier="disk", directory=tmp_path)
    train_plainly(plain, expected, classify, batches[3:])
    for batch in batches[3:]:
        step(batch)
    assert_same_parameters(model, plain)
    optimizer.load_state_dict(optimizer.state_dict())  # its own
    train_plainly(plain, expected, classify, batches)
    for batch in batches:
        step(batch)
    assert_same_parameters(model, plain)


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    model = TiedNet()
    with pytest.raises(InvalidInput, match="give a directory that can be written"):
        memfit.Step(
            model, torch.optim.AdamW(model.parameters()), classify, state_tier="disk", directory=tmp_path / "file" / "x"
        )


def test_a_full_disk_changes_nothing(tmp_path, monkeypatch):
    model = TiedNet()
    before = [each.clone() for each in model.parameters()]

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", full)
    step = memfit.Step(
        model, torch.optim.AdamW(model.parameters()), classify, update="inside", state_tier="disk", directory=tmp_path
    )
    with pytest.raises(ExecutionError, match="No space left on device; nothing was changed"):
        step(rows())
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert not step.optimizer.state
    assert list(tmp_path.iterdir()) == []


def test_a_real_limit_on_the_size_of_files(tmp_path):
    tier = DiskTier(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, hard))
    try:
        with pytest.raises(ExecutionError, match="no room for"):
            tier.allocate(10**7)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    tier.close()


def test_a_disk_that_fails_says_so(tmp_path, monkeypatch):
    model = TiedNet()
    step = memfit.Step(model, torch.optim.AdamW(model.parameters()), classify, state_tier="disk", directory=tmp_path)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("os.pwrite", fail)
    with pytest.raises(ExecutionError, match="could not write optimizer state"):
        step(rows())


def test_tensors_come_back_from_the_tiers(tmp_path):
    for tier in (DiskTier(tmp_path), HostTier(torch.device("cpu"))):
        value = torch.randn(10, 3).to(torch.bfloat16)
        place = tier.reserve(value.shape, value.dtype, value.device)
        tier.write(place, None, value)
        tier.write(place, slice(3, 5), torch.tensor([7.0, 8.0]).bfloat16())
        tier.wait()
        value.view(-1)[3:5] = torch.tensor([7.0, 8.0]).bfloat16()
        assert torch.equal(tier.read(place, None).result(), value)
        assert torch.equal(tier.read(place, slice(4, 11)).result(), value.view(-1)[4:11])
        assert torch.equal(place.tensor, value)
        tier.close()


def test_state_in_host_memory_gives_the_same_numbers(monkeypatch):
    """The tier of accelerators, run here on the one device there is."""
    monkeypatch.setattr("memfit.step.parts.LARGEST_PART", 100)
    plain, model = twins(TiedNet())
    expected, optimizer = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(model.parameters())
    updates = PartUpdates(optimizer, home_of=TieredState(HostTier(torch.device("cpu"))).home_of)
    for _ in range(3):
        batch = rows()
        train_plainly(plain, expected, classify, [batch])
        classify(model, batch).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                updates.update(parameter)
        model.zero_grad()
    assert_same_parameters(model, plain)
