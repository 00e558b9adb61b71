"""Arguments taken apart, dataclasses too."""

import dataclasses
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from memfit.trees import children_of, flatten, leaves_of, map_tensors, paths_of, unflatten


@dataclasses.dataclass
class Record:
    one: Any
    other: Any = 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    content: Any

    def __post_init__(self) -> None:
        assert not isinstance(self.content, str), "runs once"


@dataclasses.dataclass(slots=True)
class Slotted:
    content: Any


class Plain:
    def __init__(self, content: Any) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return type(other) is Plain and self.content == other.content

    __hash__ = object.__hash__


class Kind(Enum):
    ONE = 1


class Calling:
    def __call__(self) -> None:
        """Do something."""


class Pair(NamedTuple):
    first: Any
    second: Any


ONE = torch.ones(())
TREES = (
    Record(ONE),
    [Frozen(Slotted((1, ONE))), 3],
    {"a": Pair(Record([Record(1, ONE)]), Frozen([ONE, None]))},
    (1, [2]),
    Plain([Frozen(ONE)]),
)


@pytest.mark.parametrize("tree", TREES)
def test_a_tree_is_put_together_as_it_was(tree: Any) -> None:
    leaves, spec = flatten(tree)
    again = unflatten(leaves, spec)
    assert again == tree
    assert leaves_of(again) == leaves
    assert flatten(again)[1] == spec
    assert not any(dataclasses.is_dataclass(each) for each in leaves)
    assert len(paths_of(tree)) == len(leaves)


def test_what_is_put_beside_the_fields_comes_along() -> None:
    record = Record(ONE)
    record.late = [3]  # type: ignore[attr-defined]
    assert leaves_of(record) == [ONE, 2, 3]
    assert unflatten(*flatten(record)).late == [3]


def test_records_differ_by_class_and_by_what_they_hold() -> None:
    assert flatten(Record(ONE))[1] == flatten(Record(5, ONE))[1]
    assert flatten(Frozen(ONE))[1] != flatten(Slotted(ONE))[1]
    assert flatten(Frozen([ONE]))[1] != flatten(Frozen((ONE,)))[1]


def test_tensors_are_mapped_and_init_does_not_run_again() -> None:
    assert map_tensors(lambda each: "a string", Frozen([ONE, 3])) == Frozen(["a string", 3])
    assert map_tensors(lambda each: "a string", Frozen(ONE)).content == "a string"


def test_children_are_those_that_lie_right_in_a_record() -> None:
    inner = Frozen(ONE)
    children, spec = children_of(Record([inner], inner))
    assert children[0][0] is children[1] is inner
    assert unflatten(children, spec).other is inner


def test_torch_itself_takes_records_for_leaves_as_before() -> None:
    record = Record(ONE)
    leaves_of(record)
    assert pytree.tree_leaves(record)[0] is record


@pytest.mark.parametrize(
    "leaf", [None, 1, torch.ones(2), torch.nn.Linear(2, 2), Kind.ONE, Record, Calling(), range(3), object()]
)
def test_other_things_are_leaves(leaf: Any) -> None:
    assert leaves_of(leaf)[0] is leaf


def test_a_record_that_holds_itself_is_a_leaf_there() -> None:
    record = Plain(1)
    record.content = [record, ONE]
    assert leaves_of(record)[0] is record


@pytest.mark.parametrize("record", [Record(1), Plain([Frozen(None)]), Plain(())])
def test_a_record_without_a_tensor_stays_what_it_is(record: Any) -> None:
    assert leaves_of([record, ONE])[0] is record
