"""A run that is stopped and resumed is the run that never stopped, bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import safetensors.torch
import torch
from resumed_run import Dropping, batch_of, make_step
from torch import nn
from training import TiedNet, assert_same_parameters, assert_same_state, classify, rows

import memfit
from memfit.errors import InvalidFile, InvalidInput
from memfit.step.checkpoint import Checkpoint, write_checkpoint
from memfit.step.tensor_file import TensorFile, write_tensors
from memfit.step.tree import put_together, take_apart

pytestmark = pytest.mark.usefixtures("one_thread")

TECHNIQUES = {
    "plain": {},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16", "micro_batches": 2},
    "pure-bf16": {"precision": "pure-bf16"},
    "inside": {"update": "inside"},
    "disk": {"state_tier": "disk"},
    "disk+pure-bf16+inside": {"state_tier": "disk", "precision": "pure-bf16", "update": "inside"},
    "accumulate": {"accumulate": 3},
}


def options_of(name, directory):
    options = TECHNIQUES[name]
    return options | ({"directory": directory} if "state_tier" in options else {})


@pytest.mark.parametrize("name", TECHNIQUES)
def test_resumed_is_uninterrupted(name, tmp_path):
    torch.manual_seed(3)
    whole = make_step(**options_of(name, tmp_path))
    losses = [whole(batch_of(number)) for number in range(10)]
    torch.manual_seed(3)
    first = make_step(**options_of(name, tmp_path))
    for number in range(5):
        first(batch_of(number))
    first.save(tmp_path / "run.safetensors")
    torch.manual_seed(99)
    second = make_step(**options_of(name, tmp_path))
    second(batch_of(77))
    second.load(tmp_path / "run.safetensors")
    assert second.position == first.position
    assert all(torch.equal(second(batch_of(number)), losses[number]) for number in range(second.position.batches, 10))
    assert_same_parameters(second.model, whole.model)
    assert_same_state(second.optimizer, whole.optimizer)
    assert second.scheduler.state_dict() == whole.scheduler.state_dict()


def test_a_state_dict_restores_in_memory_too():
    one, other = make_step(), make_step()
    one(batch_of(0))
    other.load_state_dict(one.state_dict())
    state = torch.get_rng_state()
    expected = one(batch_of(1))
    torch.set_rng_state(state)
    assert torch.equal(other(batch_of(1)), expected)
    assert_same_parameters(one.model, other.model)
    assert_same_state(one.optimizer, other.optimizer)
    one(batch_of(2))
    assert other.position.updates == 2
    with pytest.raises(AssertionError):
        assert_same_state(one.optimizer, other.optimizer)  # they share nothing


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    """Killed again and again, wherever it was, also while it was writing."""
    script = Path(__file__).with_name("resumed_run.py")
    command = [sys.executable, str(script), str(tmp_path / "killed.safetensors"), "20"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    chance = random.Random(5)
    kills = 0
    for _ in range(2):
        running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        assert running.stdout is not None
        running.stdout.readline()  # it has begun to train
        time.sleep(chance.uniform(0.0, 0.05))
        running.send_signal(signal.SIGKILL)
        kills += running.wait() == -signal.SIGKILL
        running.stdout.close()
    assert kills
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    torch.manual_seed(3)
    whole = make_step()
    for number in range(20):
        whole(batch_of(number))
    resumed = make_step()
    resumed.load(tmp_path / "killed.safetensors")
    assert resumed.position.updates == 20
    assert_same_parameters(resumed.model, whole.model)
    assert_same_state(resumed.optimizer, whole.optimizer)
    assert torch.equal(torch.get_rng_state(), whole.state_dict()["random"]["torch"])


# Files


def test_files_are_those_of_safetensors(tmp_path):
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4).to(torch.bfloat16),
        "c": torch.tensor(7),
        "d": torch.rand(2, 2) > 0.5,
        "empty": torch.zeros(0, 3),
        "turned": torch.randn(4, 3).t(),
    }
    write_tensors(tmp_path / "ours.safetensors", tensors, {"key": "word"})
    theirs = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    assert all(torch.equal(theirs[name], tensor) for name, tensor in tensors.items())
    safetensors.torch.save_file({name: each.contiguous() for name, each in tensors.items()}, tmp_path / "theirs")
    file = TensorFile(tmp_path / "theirs")
    assert all(torch.equal(file.tensor(name), tensor) for name, tensor in tensors.items())


def test_tensors_that_are_not_aligned_are_read(tmp_path):
    tensors = {"byte": torch.tensor([1], dtype=torch.uint8), "number": torch.randn(5)}
    write_tensors(tmp_path / "file", tensors, {})
    assert torch.equal(TensorFile(tmp_path / "file").tensor("number"), tensors["number"])


def test_trees_come_back():
    tree = {
        "list": [1, 2.5, None, True, "word", float("inf")],
        "tuple": (1, (2, torch.ones(2))),
        3: OrderedDict(a=torch.zeros(1)),
        "counter": Counter({5: 2}),
    }
    encoded, tensors = take_apart(tree)
    back = put_together(encoded, tensors.__getitem__)
    assert back["list"] == tree["list"]
    assert back["tuple"][1][1] is tree["tuple"][1][1]
    assert torch.equal(back[3]["a"], torch.zeros(1))
    assert isinstance(back["counter"], Counter)


def test_shared_tensors_are_written_once():
    model = TiedNet()
    _, tensors = take_apart(model.state_dict())
    assert len(tensors) == len(list(model.parameters()))


def test_what_would_run_code_is_refused():
    with pytest.raises(InvalidInput, match=r"'\.a' holds a function"):
        take_apart({"a": lambda: None})


@pytest.mark.parametrize("damage", ["empty", "short", "text", "foreign", "new"])
def test_damaged_files_are_refused(damage, tmp_path):
    path = tmp_path / "run.safetensors"
    step = make_step()
    step(batch_of(0))
    step.save(path)
    content = path.read_bytes()
    if damage == "foreign":
        write_tensors(path, {"a": torch.ones(2)}, {})
    elif damage == "new":
        write_tensors(path, {}, {"format": "memfit.step", "version": "9", "state": "{}"})
    else:
        path.write_bytes({"empty": b"", "short": content[:-100], "text": b"hello, world " * 10}[damage])
    before = [each.clone() for each in step.model.parameters()]
    with pytest.raises(InvalidFile):
        step.load(path)
    assert all(torch.equal(one, other) for one, other in zip(before, step.model.parameters(), strict=True))


def test_checkpoints_of_other_models_are_refused(tmp_path):
    step = make_step()
    step.save(tmp_path / "run")
    model = TiedNet()
    other = memfit.Step(model, torch.optim.AdamW(model.parameters()), classify)
    with pytest.raises(InvalidFile, match="another model"):
        other.load(tmp_path / "run")
    model = Dropping(width=8)
    other = memfit.Step(model, torch.optim.AdamW(model.parameters()), classify)
    with pytest.raises(InvalidFile, match="shape"):
        other.load(tmp_path / "run")
    with pytest.raises(InvalidFile, match="cannot be read"):
        other.load(tmp_path / "nothing")


def test_nothing_is_half_written(tmp_path, monkeypatch):
    path = tmp_path / "run"
    write_checkpoint(path, {"a": torch.ones(3)})

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(path, {"a": torch.zeros(3)})
    assert [each.name for each in tmp_path.iterdir()] == ["run"]
    assert torch.equal(Checkpoint(path).state()["a"].read(), torch.ones(3))


def test_buffers_and_extra_state_come_back(tmp_path):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(8, 4), 0
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, features):
            self.seen += 1
            self.mean.lerp_(features.mean(0), 0.1)
            return self.linear(features - self.mean)

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    model = Counting()
    step = memfit.Step(model, torch.optim.SGD(model.parameters()), classify)
    step(rows())
    step.save(tmp_path / "run")
    other = Counting()
    memfit.Step(other, torch.optim.SGD(other.parameters()), classify).load(tmp_path / "run")
    assert other.seen == 1
    assert torch.equal(other.mean, model.mean)
