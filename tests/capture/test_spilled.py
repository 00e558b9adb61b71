"""Tensors in a file come back as they were, and the file is gone afterwards."""

import contextlib
import os
import shutil

import pytest
import torch
from budgeted import ConvNet, Perceptron, images, rows
from torch import nn

from memfit.capture.rehearse import nothing_remains, step
from memfit.capture.sample import Sample
from memfit.capture.spilled import (
    OverRoom,
    SavedTensors,
    SpillFile,
    chunks_of,
    dropped_activations,
    lasting_tensors,
    spilled_activations,
)
from memfit.errors import ExecutionError
from memfit.measure.peak import measure_peak
from memfit.measure.stretches import measure_stretches
from memfit.tensors import same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
BIG = 2**15  # elements


def there_and_back(tensor, keep=()):
    with SpillFile() as file:
        saved = SavedTensors(file, keep)
        back = saved.unpack(saved.pack(tensor))
        return back, file.size_bytes


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(BIG),
        lambda: torch.randn(4, BIG).t(),
        lambda: torch.randn(8, BIG)[1:, 5:-3],
        lambda: torch.randn(BIG, 1).expand(BIG, 3),
        lambda: torch.randn(1, 8, 64, 64).to(memory_format=torch.channels_last),
        lambda: torch.randn(BIG).bfloat16(),
        lambda: torch.randn(BIG, dtype=torch.complex64),
        lambda: torch.randint(9, (BIG,)),
        lambda: torch.randn(BIG) > 0,
        lambda: torch.full((BIG,), float("nan")),
    ],
)
def test_a_tensor_comes_back_as_it_was(make):
    tensor = make()
    back, size_bytes = there_and_back(tensor)
    assert size_bytes > 0
    assert back.data_ptr() != tensor.data_ptr()
    assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert back.data_ptr() % 64 == tensor.data_ptr() % 64
    assert same_bits(back, tensor)


@pytest.mark.parametrize("make", [lambda: torch.randn(100), lambda: torch.randn(BIG, dtype=torch.complex64).conj()])
def test_what_is_small_or_not_plain_stays_in_memory(make):
    tensor = make()
    back, size_bytes = there_and_back(tensor)
    assert size_bytes == 0
    assert back.data_ptr() == tensor.data_ptr()


def test_views_of_what_is_there_stay_in_memory():
    weight = nn.Parameter(torch.randn(64, BIG))
    back, size_bytes = there_and_back(weight.t()[3:], keep=[weight])
    assert size_bytes == 0
    assert back.untyped_storage()._cdata == weight.untyped_storage()._cdata


def test_a_value_is_written_once_until_somebody_writes_into_it():
    values = torch.randn(4, BIG)
    with SpillFile() as file:
        saved = SavedTensors(file, ())
        first, second = saved.pack(values), saved.pack(values.t())
        assert file.size_bytes == values.nbytes
        assert saved.unpack(first).data_ptr() != values.data_ptr()
        one, other = saved.unpack(first), saved.unpack(second)
        assert one.data_ptr() == other.data_ptr()
        before = values.clone()
        third = saved.pack(values.mul_(2))
        assert file.size_bytes == 2 * values.nbytes
        assert same_bits(saved.unpack(first), before)
        assert same_bits(saved.unpack(third), values)


def test_memory_that_is_used_again_is_another_value():
    with SpillFile() as file:
        saved = SavedTensors(file, ())
        packed = [saved.pack(torch.full((BIG,), float(number))) for number in range(8)]
        assert [float(saved.unpack(each)[7]) for each in packed] == [float(number) for number in range(8)]


@pytest.mark.parametrize(("make", "batch"), [(ConvNet, images), (Perceptron, rows)])
def test_a_spilled_step_makes_the_same_bits_in_less_memory(make, batch):
    model, sample = make(), Sample.of(batch())
    kept = [*model.parameters(), *model.buffers(), *sample.tensors()]

    def run():
        made.append([*(each.clone() for each in step(model, sample, seed=1)), *(each.grad for each in kept)])

    peaks, made = [], []
    for spills in (False, True):
        with nothing_remains(model, sample):
            if spills:
                with spilled_activations(kept):
                    peaks.append(measure_peak(run, resident=[model, sample.args]).peak_bytes)
            else:
                peaks.append(measure_peak(run, resident=[model, sample.args]).peak_bytes)
    assert all((a is None and b is None) or same_bits(a, b) for a, b in zip(*made, strict=True))
    assert peaks[1] < 0.6 * peaks[0]


class Overwriting(nn.Module):
    """Saves views, writes in place, returns what it has saved, and holds a value to the end."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(128, 384), nn.Linear(128, 128)

    def forward(self, features):
        query, key, value = self.first(features).chunk(3, -1)
        mixed = (query.sigmoid() * key).relu_() + value
        return self.second(mixed).tanh(), (mixed + 1).exp_()


@pytest.mark.parametrize(("make", "batch"), [(ConvNet, images), (Perceptron, rows), (Overwriting, rows)])
def test_a_spilled_step_is_measured_as_if_it_were_in_memory(make, batch):
    model, sample = make(), Sample.of(batch())

    def run():
        step(model, sample, seed=0)

    measured = []
    for around in (contextlib.nullcontext(), spilled_activations(lasting_tensors(model, sample))):
        with nothing_remains(model, sample), around:
            run()
            model.zero_grad()
            measured.append(measure_stretches(run, resident=[model, sample.args]))
    eager, spilled = measured
    assert eager == spilled


def test_arguments_come_back_with_their_strides_and_flags():
    features, scale = torch.randn(4, BIG, requires_grad=True), torch.ones(3)
    sample = Sample((features.t(), 2), {"scale": scale})
    with SpillFile() as file:
        back = SavedTensors(file, ()).keep_sample(sample)()
    assert back.args[1] == 2
    assert back.args[0].requires_grad
    assert back.args[0].stride() == features.t().stride()
    assert back.args[0].data_ptr() != features.data_ptr()
    assert torch.equal(back.args[0], features.t())
    assert back.kwargs["scale"].data_ptr() == scale.data_ptr()


def open_files():
    return [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]


def test_an_argument_that_is_given_twice_comes_back_as_one_tensor():
    given, other = torch.randn(64, 64), torch.randn(64, 64)
    with SpillFile() as file:
        back = SavedTensors(file, ()).keep_sample(Sample((given, given), {"other": other}))()
        assert back.args[0] is back.args[1]
        assert back.kwargs["other"] is not back.args[0]
        assert torch.equal(back.args[0], given)


def test_the_file_is_gone_at_the_end_and_after_an_error(tmp_path):
    weight = torch.randn(BIG, requires_grad=True)
    with spilled_activations((), str(tmp_path)) as file:
        weight.exp().sum().backward()
        assert file.size_bytes == weight.nbytes
        assert any(str(tmp_path) in name for name in open_files())
    with contextlib.suppress(KeyboardInterrupt), spilled_activations((), str(tmp_path)):
        weight.exp()
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    assert not any(str(tmp_path) in name for name in open_files())


def test_a_graph_that_outlives_its_file_says_so():
    weight = torch.randn(BIG, requires_grad=True)
    with spilled_activations(()):
        loss = weight.exp().sum()
    with pytest.raises(ExecutionError, match="closed file"):
        loss.backward()


def test_a_disk_that_is_too_small_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 2**20))
    with pytest.raises(ExecutionError, match=r"a file of 2\.00 MiB is needed.*1\.00 MiB are free"):
        SpillFile(expected_bytes=2**21)
    SpillFile(expected_bytes=2**20).close()


def test_a_directory_or_file_that_cannot_be_written_says_so(monkeypatch):
    with pytest.raises(ExecutionError, match="set TMPDIR"):
        SpillFile("/not/there")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    weight = torch.randn(BIG, requires_grad=True)
    with pytest.raises(ExecutionError, match=r"No space left on device.*TMPDIR"), spilled_activations(()):
        weight.exp()


def test_a_forward_pass_that_holds_too_much_is_ended():
    weight = torch.randn(BIG, requires_grad=True)

    def forward(holds):
        held = [weight.exp()]
        for _ in range(6):
            held = [*held[-holds:], held[-1].exp()]

    for around in (spilled_activations, dropped_activations):
        with around([weight], room_bytes=3 * weight.nbytes):
            forward(holds=1)
        with pytest.raises(OverRoom, match="at once"), around([weight], room_bytes=3 * weight.nbytes):
            forward(holds=5)


def test_nothing_can_be_differentiated_that_was_dropped():
    weight = torch.randn(BIG, requires_grad=True)
    with dropped_activations(()):
        loss = weight.exp().sum()
    with pytest.raises(ExecutionError, match="without one"):
        loss.backward()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(100_000),
        torch.randn(7, 50_000).t(),
        torch.randn(3, 40_000, 2),
        torch.randn(5, 3, 2)[:, 1:],
        torch.randn(8, 16, dtype=torch.float64)[:, 3],
        torch.randn(40_000, 2, dtype=torch.float64)[:, 1],
        torch.randn(2, 100_000) > 0,
    ],
)
def test_a_stored_tensor_is_read_in_the_same_parts(tensor):
    with SpillFile() as file:
        file.append(torch.zeros(3))
        stored = file.store(tensor)
        pairs = list(zip(chunks_of(tensor), chunks_of(stored), strict=True))
        assert all(torch.equal(one, other) for one, other in pairs)
        assert all(one.nbytes <= 2**16 for one, _ in pairs)
        assert sum(one.numel() for one, _ in pairs) == tensor.numel()
        assert torch.equal(stored.read(), tensor)
        assert torch.equal(file.keep(tensor)(), tensor)


def test_a_transform_keeps_what_it_saves_in_memory_and_the_rest_is_spilled():
    weight = torch.randn(8, 2**12, requires_grad=True)

    def gradient():
        inside = torch.func.grad(lambda each: each.sin().square().sum())(weight)
        (inside.sum() + weight.exp().square().sum()).backward()
        found, weight.grad = weight.grad, None
        return found

    expected = gradient()
    with spilled_activations([weight]) as file:
        found = gradient()
        assert file.size_bytes >= weight.nbytes
        users = torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each)
        with users, pytest.raises(RuntimeError, match="saved tensor hooks"):
            torch.func.grad(torch.sin)(torch.ones(()))
    assert torch.equal(found, expected)
