import re
from collections import OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.arguments import containers_in, pattern_of
from memfit.capture.outputs import Parts
from memfit.capture.sample import with_others

A = torch.ones(2)


def test_containers_are_counted_as_often_as_they_are_there() -> None:
    inner: list[Any] = [A]
    found = containers_in((A, inner, {"x": inner}), {"y": (1, inner)})
    assert [type(each) for each in found] == [list, dict, list, tuple, list]
    assert pattern_of(found) == (0, 1, 0, 0)
    assert pattern_of(containers_in((A, [A], [A], (), ()), {})) == ()


def test_others_are_shared_as_the_arguments_are() -> None:
    inner: list[Any] = [A, 1]
    other = with_others((inner, {"x": inner}, torch.Size([2])), {"y": inner}, lambda each: each + 1)
    assert other.args[0] is other.args[1]["x"] is other.kwargs["y"]
    assert other.args[0] is not inner
    assert torch.equal(other.args[0][0], A + 1)
    assert isinstance(other.args[2], torch.Size)


def test_what_is_found_twice_is_made_once() -> None:
    shared = {"a": A}
    kept: list[Any] = [A]
    given = [A, [1]]
    parts = Parts([(shared, kept, given[1]), [shared, A]], given[1:], [kept])
    output, left = parts.output((shared, kept, given[1])), parts.template([shared, A])
    assert len(parts.tensors) == 1
    made: dict[int, Any] = {}
    now = [[2]]
    rebuilt, beside = output.rebuild([A + 1], now, made), left.rebuild([A + 1], now, made)
    assert rebuilt[0] is beside[0]
    assert rebuilt[1] is kept
    assert rebuilt[2] is now[0]


class Changes(nn.Module):
    def __init__(self, change: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.change = change

    def forward(self, batch: torch.Tensor, found: Any) -> torch.Tensor:
        hidden: torch.Tensor = self.body(batch)
        self.change(found, hidden)
        return hidden.sum()


CHANGES: dict[str, tuple[Any, Any]] = {
    "a list appended to": (lambda: [1], lambda found, hidden: found.append(hidden)),
    "a list reversed": (lambda: [1, A, 3], lambda found, hidden: found.reverse()),
    "a key taken and put last": (lambda: {"x": A, "y": 2}, lambda found, hidden: found.update(x=found.pop("x"))),
    "a list in a dictionary": (lambda: {"x": [1, 2]}, lambda found, hidden: found["x"].pop()),
    "an ordered one moved": (lambda: OrderedDict(a=1, b=2), lambda found, hidden: found.move_to_end("a")),
    "a default made": (lambda: defaultdict(list), lambda found, hidden: found["z"].append(hidden)),
    "a queue rotated": (lambda: deque([1, 2, 3], maxlen=3), lambda found, hidden: found.append(hidden)),
    "all removed": (lambda: {"x": A}, lambda found, hidden: found.clear()),
}


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_what_a_forward_does_to_an_argument_is_done_by_every_call(make: Any, change: Any) -> None:
    batch = torch.randn(3, 4)
    model = Changes(change)
    plain = make()
    model(batch, plain)
    memfit.fit(model, (batch, make()), "smallest", time_limit=1, progress=False)
    for _ in range(3):
        found = make()
        model.zero_grad()
        model(batch, found).backward()
        assert type(found) is type(plain)
        assert _words(found) == _words(plain)


def _words(value: Any) -> str:
    return re.sub(r"grad_fn=<\w+>|\s", "", str(value))
