"""Which values are meant by types, patterns and numbers of blocks."""

import dataclasses
import itertools

import pytest
from handmade import KIB, Case, Layer, Step, names_of, training

from memfit.errors import InvalidInput
from memfit.ir import Graph
from memfit.plan.select import selected_values

SIZE = 100 * KIB
PLACES = {
    "embed": "embed",
    "norm0": "blocks.0.norm",
    "mlp0": "blocks.0.mlp",
    "norm1": "blocks.1.norm",
    "mlp1": "blocks.1.mlp",
    "norm2": "blocks.2.norm",
    "mlp2": "blocks.2.mlp",
    "head": "head",
}


class Norm:
    pass


class Other:
    pass


MODULES = {
    "": Other(),
    "embed": Other(),
    "blocks": Other(),
    **{f"blocks.{number}": Other() for number in range(3)},
    **{f"blocks.{number}.norm": Norm() for number in range(3)},
    **{f"blocks.{number}.mlp": Other() for number in range(3)},
    "head": Other(),
}


def in_modules(graph: Graph) -> Graph:
    operations = [dataclasses.replace(each, module=PLACES.get(each.name, "")) for each in graph.operations]
    return dataclasses.replace(graph, operations=tuple(operations))


@pytest.fixture(scope="module")
def case() -> Case:
    names = ["x", *PLACES]
    layers = [
        Layer(Step(after, reads=before, makes=after), saves=before) for before, after in itertools.pairwise(names)
    ]
    made = training(dict.fromkeys(PLACES, SIZE), layers)
    return dataclasses.replace(made, graph=in_modules(made.graph))


def selected(case: Case, *selections: object) -> set[str]:
    problem = case.problem()
    return set(names_of(problem, selected_values(problem, selections, MODULES, "recompute")))  # type: ignore[arg-type]


def test_a_type_means_what_its_modules_make(case):
    assert selected(case, Norm) == {"norm0", "norm1", "norm2"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("embed", {"embed"}),
        ("blocks.*.norm", {"norm0", "norm1", "norm2"}),
        ("blocks.1.norm", {"norm1"}),
        ("*.mlp", {"mlp0", "mlp1", "mlp2"}),
    ],
)
def test_a_pattern_means_the_modules_it_matches(case, pattern, expected):
    assert selected(case, pattern) == expected


def test_a_module_with_parts_means_what_does_not_leave_it(case):
    assert selected(case, "blocks.?") == {"norm0", "norm1", "norm2"}
    assert selected(case, "blocks") == {"norm0", "mlp0", "norm1", "mlp1", "norm2"}


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, {"norm0", "norm1", "norm2"}),
        (2, {"norm0", "mlp0", "norm1", "norm2"}),
        (3, {"norm0", "mlp0", "norm1", "mlp1", "norm2"}),
        (99, {"norm0", "mlp0", "norm1", "mlp1", "norm2"}),
    ],
)
def test_a_number_means_runs_of_blocks(case, length, expected):
    assert selected(case, length) == expected


def test_several_selections_add_up(case):
    assert selected(case, "embed", Norm) == {"embed", "norm0", "norm1", "norm2"}


def test_nothing_selected_is_nothing(case):
    assert selected(case) == set()


@pytest.mark.parametrize("selection", ["no_such", "blocks.9", dict, "Blocks.0", "head"])
def test_a_selection_that_means_nothing_is_answered_with_names(case, selection):
    with pytest.raises(InvalidInput, match="top-level names: embed, blocks, head"):
        selected(case, selection)


@pytest.mark.parametrize("selection", [0, -1, True, 2.5, None])
def test_what_cannot_select_is_refused(case, selection):
    with pytest.raises(InvalidInput):
        selected(case, selection)


def test_a_number_needs_a_list_of_blocks():
    case = training({"a": SIZE, "b": SIZE}, [Layer(Step("a", reads="x", makes="a")), Layer(Step("b", "a", "b"))])
    problem = case.problem()
    with pytest.raises(InvalidInput, match="matches no value"):
        selected_values(problem, [1], {"": Other(), "a": Other()}, "recompute")
