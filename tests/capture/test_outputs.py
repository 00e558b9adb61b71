import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

from memfit.capture.outputs import differentiated, take_apart


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any
    note: str = "note"


@dataclasses.dataclass
class Checked:
    value: torch.Tensor
    made: int = 0

    def __post_init__(self) -> None:
        self.made += 1


A, B = torch.tensor(1.0), torch.tensor([2.0, 3.0])

OUTPUTS: dict[str, tuple[Any, list[str]]] = {
    "a tensor": (A, ["output"]),
    "a tuple": ((A, B), ["0", "1"]),
    "a list with constants": ([A, None, 3, "text", B], ["0", "4"]),
    "a dict": ({"loss": A, "logits": B}, ["loss", "logits"]),
    "an ordered dict": (OrderedDict(z=A, a=B), ["z", "a"]),
    "nested": ({"a": [A, (B,)]}, ["a.0", "a.1.0"]),
    "a named tuple": (Pair(A, {"k": B}), ["first", "second.k"]),
    "a dataclass": (Frozen(A), ["value"]),
    "a dataclass of dataclasses": (Frozen([Frozen(A), B]), ["value.0.value", "value.1"]),
    "a dict of dataclasses": ({"x": Frozen(A)}, ["x.value"]),
    "nothing": (None, []),
}


@pytest.mark.parametrize(("output", "names"), OUTPUTS.values(), ids=OUTPUTS)
def test_an_output_is_put_together_again(output: Any, names: list[str]) -> None:
    tensors, template = take_apart(output)
    assert len(tensors) == len(names)
    others = [tensor + 10 for tensor in tensors]
    again, _ = take_apart(template.rebuild(others))
    assert type(template.rebuild(others)) is type(output)
    assert [id(tensor) for tensor in again] == [id(tensor) for tensor in others]


def test_constants_stay() -> None:
    tensors, template = take_apart(Frozen([A, 3, None], note="mine"))
    rebuilt = template.rebuild(tensors)
    assert rebuilt.note == "mine"
    assert rebuilt.value[1:] == [3, None]


def test_a_dataclass_is_not_initialised_again() -> None:
    tensors, template = take_apart(Checked(A))
    assert template.rebuild(tensors).made == 1


def weight(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, requires_grad=True)


@pytest.mark.parametrize(
    ("tensors", "backward_from", "expected"),
    [
        ([weight(3)], "auto", (0,)),
        ([weight(3), weight(2)], "auto", (0, 1)),
        ([weight(), weight(2)], "auto", (0,)),
        ([weight(), weight(2)], "all", (0, 1)),
        ([weight(2), weight()], "auto", (1,)),
        ([weight(), weight(), weight(2)], "auto", (0, 1, 2)),
        ([torch.zeros(()), weight(2)], "auto", (1,)),
        ([torch.zeros(2)], "auto", ()),
    ],
)
def test_the_backward_starts_at_the_only_loss_or_everywhere(
    tensors: list[torch.Tensor], backward_from: str, expected: tuple[int, ...]
) -> None:
    assert differentiated(tensors, backward_from) == expected
