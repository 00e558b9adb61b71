import copy
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


class Weighted(Pair):
    """A named tuple with a dictionary of its own."""

    weight = 1.0


@dataclasses.dataclass
class Registered:
    value: torch.Tensor
    weight = 1.0


torch.utils._pytree.register_dataclass(Registered)


@dataclasses.dataclass
class Half:
    value: torch.Tensor
    later: torch.Tensor = dataclasses.field(init=False)


@pytest.mark.parametrize(
    "output", [Checked(A), Registered(A), Weighted(A, None)], ids=lambda output: type(output).__name__
)
@pytest.mark.parametrize("nested", [False, True])
def test_attributes_beside_what_is_held_stay(output: Any, nested: bool) -> None:
    output = copy.copy(output)
    output.weight, output.aux, output.notes = 3.0, B, {"n": 2, "more": A}
    tensors, template = take_apart({"inner": [output, B]} if nested else output)
    assert {id(each) for each in tensors} == {id(A), id(B)}
    moved = template.shifted(2).rebuild([A, A, *(each + 1 for each in tensors)])
    again = moved["inner"][0] if nested else moved
    assert type(again) is type(output)
    assert (again.weight, again.notes["n"]) == (3.0, 2)
    assert torch.equal(again.aux, B + 1)
    assert torch.equal(again.notes["more"], A + 1)
    assert torch.equal(again[0] if isinstance(again, tuple) else again.value, A + 1)
    only = template.only([])
    assert (only.rebuild([])["inner"][0] if nested else only.rebuild([])).aux is None


def test_a_field_without_a_value_stays_so() -> None:
    tensors, template = take_apart(Half(A))
    assert not hasattr(template.rebuild(tensors), "later")


def test_what_cannot_be_made_again_is_refused() -> None:
    class Odd(Pair):
        def __new__(cls) -> "Odd":
            return super().__new__(cls, A, B)

    with pytest.raises(ValueError, match="a Odd, cannot be made again"):
        take_apart(Odd())


def test_an_attribute_that_cannot_be_looked_into_is_refused() -> None:
    output = Checked(A)
    output.thing = object()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="holds a object"):
        take_apart(output)


def test_a_cache_is_to_be_left_out() -> None:
    class DynamicCache:
        pass

    with pytest.raises(ValueError, match=r"use_cache=False"):
        take_apart((A, DynamicCache()))
