"""What real forwards leave behind outside of parameters and buffers: nothing, whoever holds it."""

import collections
import io
import itertools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memfit.capture import state
from memfit.capture.rehearse import nothing_remains, step
from memfit.capture.sample import Sample
from memfit.errors import CaptureError

AROUND = SimpleNamespace()
COUNT = 0


class Config:
    calls = 0


class Slotted:
    __slots__ = ("number",)


def slotted() -> Slotted:
    thing = Slotted()
    thing.number = 0
    return thing


def count_globally() -> None:
    global COUNT
    COUNT += 1


def counter() -> Callable[[], int]:
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1
        return count

    return counted


class Changing(nn.Module):
    """With one of everything that a forward may change."""

    def __init__(self, change: Callable[["Changing"], Any]) -> None:
        super().__init__()
        self.change = change
        self.linear = nn.Linear(4, 4)
        self.slow = nn.Linear(4, 4).requires_grad_(False)
        self.tensor = torch.zeros(4)
        self.array = np.zeros(4)
        self.strings = np.array(["a", "b"], dtype=object)
        self.bytes = bytearray(b"abc")
        self.last: collections.deque[int] = collections.deque([1, 2], maxlen=2)
        self.counts = collections.Counter(x=1)
        self.ordered = collections.OrderedDict(a=1)
        self.space = SimpleNamespace(deep=[SimpleNamespace(number=0)])
        self.slotted = slotted()
        self.drawn = {1}
        self.generator = torch.Generator().manual_seed(3)
        self.random = random.Random(3)
        self.numpy = np.random.default_rng(3)
        self.old_numpy = np.random.RandomState(3)
        self.rest = iter([1, 2, 3])
        self.hidden = [nn.Linear(4, 4)]
        self.counter = counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._change()
        return self.linear(x).sum()

    @torch.no_grad()
    def _change(self) -> None:
        self.change(self)
        if not x_is_there():  # what is named here can be changed
            print(COUNT, AROUND, Config, count_globally)


def x_is_there() -> bool:
    return True


def seen(model: Changing) -> str:
    """Write all that the model and its module hold, without moving it."""
    tensors = [*model.state_dict().values(), model.tensor, AROUND.tensor, *AROUND.part.state_dict().values()]
    tensors += [model.hidden[0].weight, model.generator.get_state(), AROUND.generator.get_state()]
    arrays = [model.array, model.strings, AROUND.array]
    plain = [model.bytes, model.last, model.counts, model.ordered, model.space, model.slotted.number, model.drawn]
    plain += [model.random.getstate(), model.numpy.bit_generator.state, model.old_numpy.get_state(legacy=False)]
    plain += [model.rest.__reduce__(), COUNT, Config.calls, [*vars(Config)], AROUND.list, random.getstate()]
    plain += [model.counter.__closure__[0].cell_contents, np.random.get_state(legacy=False), [*vars(model)]]
    return repr([[each.tolist() for each in (*tensors, *arrays)], plain])


CHANGES: dict[str, Callable[[Changing], Any]] = {
    "a frozen parameter": lambda model: model.slow.weight.mul_(0.9),
    "a frozen parameter behind autograd's back": lambda model: model.slow.weight.data.mul_(0.9),
    "the memory of a frozen parameter": lambda model: setattr(model.slow.weight, "data", model.slow.weight * 2),
    "a trained parameter": lambda model: model.linear.weight.renorm_(2, 0, 0.1),
    "a tensor": lambda model: model.tensor.add_(1),
    "an array": lambda model: model.array.__iadd__(1),
    "an array of objects": lambda model: model.strings.__setitem__(0, "c"),
    "bytes": lambda model: model.bytes.extend(b"d"),
    "a deque": lambda model: model.last.append(3),
    "a counter": lambda model: model.counts.update("xy"),
    "an ordered dictionary": lambda model: model.ordered.update(b=2),
    "something deep inside": lambda model: setattr(model.space.deep[0], "number", 1),
    "a slot": lambda model: setattr(model.slotted, "number", 1),
    "a set": lambda model: model.drawn.add(2),
    "torch's generator": lambda model: torch.rand(3, generator=model.generator),
    "Python's generator": lambda model: model.random.random(),
    "Python's own generator": lambda model: random.random(),
    "NumPy's generator": lambda model: model.numpy.random(),
    "NumPy's older generator": lambda model: model.old_numpy.rand(),
    "NumPy's own generator": lambda model: np.random.rand(),
    "an iterator": lambda model: next(model.rest),
    "a module in a list": lambda model: model.hidden[0].weight.add_(1),
    "a closure": lambda model: model.counter(),
    "a new attribute": lambda model: setattr(model, "late", 1),
    "a global": lambda model: count_globally(),
    "a global tensor": lambda model: AROUND.tensor.add_(1),
    "a global array": lambda model: AROUND.array.__setitem__(0, 1),
    "a global list": lambda model: AROUND.list.append(1),
    "a global module": lambda model: AROUND.part.weight.add_(1),
    "a global generator": lambda model: torch.rand(3, generator=AROUND.generator),
    "a class": lambda model: setattr(Config, "calls", Config.calls + 1),
    "a new attribute of a class": lambda model: setattr(Config, "late", 1),
}


@pytest.fixture(autouse=True)
def around() -> Iterator[None]:
    AROUND.tensor, AROUND.array, AROUND.list = torch.zeros(2), np.zeros(2), [1]
    AROUND.part, AROUND.generator = nn.Linear(2, 2), torch.Generator().manual_seed(1)
    yield
    AROUND.__dict__.clear()


@pytest.mark.parametrize("kind", CHANGES)
def test_what_a_real_forward_changes_is_put_back(kind: str) -> None:
    model, sample = Changing(CHANGES[kind]), Sample.of(torch.randn(2, 4))
    before = seen(model)
    for _ in range(2):  # the second time it is known what is written
        with nothing_remains(model, sample):
            step(model, sample, seed=1)
            step(model, sample, seed=1)
            assert seen(model) != before
        assert seen(model) == before


@pytest.mark.parametrize(
    "make", [itertools.count, lambda: itertools.cycle([1, 2]), lambda: (each for each in (1, 2)), lambda: zip([1, 2])]
)
def test_an_iterator_that_cannot_be_put_back_is_refused_if_it_was_moved(make: Callable[[], Iterator[Any]]) -> None:
    model = nn.Linear(4, 4)
    model.turns = make()  # type: ignore[assignment]
    sample = Sample.of(torch.zeros(2, 4))
    with nothing_remains(model, sample):
        pass
    with (
        pytest.raises(CaptureError, match="the forward moves on an iterator"),
        nothing_remains(model, sample),
    ):
        next(model.turns)  # type: ignore[call-overload]


def test_arguments_are_put_back() -> None:
    model = nn.Linear(4, 4)
    batch, notes = torch.zeros(2, 4), ["a"]
    with nothing_remains(model, Sample((batch,), {"notes": notes})):
        batch.add_(1)
        notes.append("b")
    assert batch.eq(0).all()
    assert notes == ["a"]


def test_files_are_left_alone() -> None:
    model = nn.Linear(4, 4)
    model.told = io.StringIO("a")  # type: ignore[assignment]
    with nothing_remains(model, Sample()):
        pass
    assert model.told.read() == "a"


def test_gradients_of_modules_elsewhere_are_put_back() -> None:
    model, sample = Changing(lambda _: None), Sample.of(torch.randn(2, 4))
    weight = model.hidden[0].weight
    weight.grad = before = torch.ones_like(weight)
    with nothing_remains(model, sample):
        weight.sum().backward()
        assert weight.grad is not before
    assert weight.grad is before
    assert before.eq(1).all()


def test_a_parameter_that_is_written_only_later_is_named() -> None:
    model, sample = Changing(lambda _: None), Sample.of(torch.randn(2, 4))
    with nothing_remains(model, sample):
        step(model, sample, seed=1)
    with pytest.raises(CaptureError, match=r"changes slow\.weight, where it changed nothing the first time"):  # noqa: SIM117
        with nothing_remains(model, sample), torch.no_grad():
            model.slow.weight.add_(1)


def test_parameters_are_copied_once_unless_they_are_written() -> None:
    model, sample = Changing(CHANGES["a frozen parameter"]), Sample.of(torch.randn(2, 4))
    with nothing_remains(model, sample):
        step(model, sample, seed=1)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        kept.append(tensor)
        return state.copied(tensor)

    with nothing_remains(model, sample, keep=keep):
        pass
    assert any(each is model.slow.weight for each in kept)
    assert not any(each is model.linear.weight for each in kept)


class OwnIterator:
    """An iterator that refuses to be pickled, as those of DataLoaders do."""

    def __init__(self) -> None:
        self.place = 0

    def __next__(self) -> int:
        self.place += 1
        return self.place

    def __getstate__(self) -> None:
        raise NotImplementedError


def test_an_iterator_that_cannot_be_pickled_is_put_back_by_its_attributes() -> None:
    model = nn.Linear(2, 2)
    model.numbers = OwnIterator()
    with nothing_remains(model, Sample((torch.randn(2, 2),))):
        next(model.numbers)
    assert model.numbers.place == 0
