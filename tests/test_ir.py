import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit import ir
from memfit.errors import InvalidFile
from memfit.ir import Compute, Free, Graph, Kind, Operation, Phase, Program, Storage

sizes = st.integers(min_value=0, max_value=2**40)

storages = st.builds(
    Storage,
    name=st.text(max_size=8),
    size_bytes=sizes,
    kind=st.sampled_from(Kind),
    dtype=st.sampled_from(["float32", "int64"]),
    shape=st.lists(sizes, max_size=3).map(tuple),
    module=st.text(max_size=8),
    source=st.text(max_size=8),
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any graph whose indices are in range; it need not mean anything."""
    made = draw(st.lists(storages, min_size=1, max_size=5))
    index = st.integers(min_value=0, max_value=len(made) - 1)
    indices = st.lists(index, max_size=3).map(tuple)
    operation = st.builds(
        Operation,
        name=st.text(max_size=8),
        target=st.text(max_size=8),
        phase=st.sampled_from(Phase),
        inputs=indices,
        outputs=indices,
        overwrites=st.none() | index,
        may_overwrite=st.none() | index,
        technique=st.text(max_size=8),
        signature=st.text(max_size=8),
        flops=sizes,
        random=st.booleans(),
        frame=st.none() | sizes,
        checkpoint=st.none() | sizes,
        module=st.text(max_size=8),
        source=st.text(max_size=8),
    )
    return Graph(
        storages=tuple(made),
        operations=tuple(draw(st.lists(operation, max_size=4))),
        resident=draw(indices),
        tangents=draw(indices),
        held=draw(indices),
        written_back=draw(indices),
        trained=tuple(draw(st.lists(st.tuples(index, index), max_size=2))),
        alternatives=tuple(draw(st.lists(operation, max_size=2))),
    )


instructions = st.lists(st.builds(Compute, sizes, st.booleans()) | st.builds(Free, sizes), max_size=5).map(tuple)
programs = st.builds(Program, graph_digest=st.text(max_size=16), forward=instructions, backward=instructions)


@given(graphs())
def test_a_graph_survives_its_file(graph: Graph) -> None:
    read = Graph.from_json(graph.to_json())
    assert read == graph
    assert read.digest() == graph.digest()


@given(programs)
def test_a_program_survives_its_file(program: Program) -> None:
    assert Program.from_json(program.to_json()) == program


SMALL = Graph(
    storages=(
        Storage(name="weight", size_bytes=8, kind=Kind.PARAMETER, dtype="float32", shape=(2,)),
        Storage(name="mul", size_bytes=8, kind=Kind.OUTPUT, dtype="float32", shape=(2,)),
    ),
    operations=(
        Operation(
            name="mul", target="aten.mul.Tensor", phase=Phase.FORWARD, inputs=(0,), outputs=(1,), overwrites=None
        ),
    ),
    resident=(0,),
    tangents=(),
    held=(1,),
)
LINE = Program(graph_digest=SMALL.digest(), forward=(Compute(0),), backward=(Free(1),))


def changed(text: str, **fields: Any) -> str:
    return json.dumps(json.loads(text) | fields)


def test_the_written_form_of_a_program_is_this() -> None:
    assert json.loads(LINE.to_json()) == {
        "format": "memfit.program",
        "version": 1,
        "graph_digest": SMALL.digest(),
        "forward": [["compute", 0, False]],
        "backward": [["free", 1]],
    }


def test_the_digest_is_the_same_in_another_process() -> None:
    code = (
        "import sys, types; package = types.ModuleType('memfit'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['memfit'] = package  # without running its __init__, which needs torch\n"
        "from memfit.ir import Graph; print(Graph.from_json(sys.stdin.read()).digest())"
    )
    folder = str(Path(ir.__file__).parent)
    run = subprocess.run(
        [sys.executable, "-c", code, folder],
        input=SMALL.to_json(),
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == SMALL.digest()


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(SMALL, held=()),
        dataclasses.replace(SMALL, trained=((0, 1),)),
        dataclasses.replace(SMALL, storages=(SMALL.storages[0], dataclasses.replace(SMALL.storages[1], shape=(9,)))),
        dataclasses.replace(SMALL, operations=(dataclasses.replace(SMALL.operations[0], overwrites=0),)),
        dataclasses.replace(SMALL, operations=(dataclasses.replace(SMALL.operations[0], may_overwrite=0),)),
    ],
)
def test_any_difference_changes_the_digest(other: Graph) -> None:
    assert other.digest() != SMALL.digest()


@pytest.mark.parametrize("data", [SMALL, SMALL.storages[0], SMALL.operations[0], LINE, LINE.forward[0]])
def test_data_cannot_be_changed(data: Any) -> None:
    field = dataclasses.fields(data)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(data, field, getattr(data, field))


@pytest.mark.parametrize("read", [Graph.from_json, Program.from_json])
@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", "3", '"graph"', "{}", '{"format": "memfit.other", "version": 1}']
)
def test_a_foreign_file_is_refused(read: Any, text: str) -> None:
    with pytest.raises(InvalidFile, match=r"not a memfit\.(graph|program) file"):
        read(text)


@pytest.mark.parametrize("data", [SMALL, LINE])
def test_a_file_cut_off_anywhere_is_refused(data: Graph | Program) -> None:
    text = data.to_json()
    for length in range(len(text)):
        with pytest.raises(InvalidFile, match="not whole JSON"):
            type(data).from_json(text[:length])


def test_a_program_is_not_read_as_a_graph() -> None:
    with pytest.raises(InvalidFile, match=r"not a memfit\.graph file: its format is 'memfit\.program'"):
        Graph.from_json(LINE.to_json())


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_named(version: object) -> None:
    with pytest.raises(InvalidFile, match=f"version {version!r} was found, this memfit reads version 1"):
        Graph.from_json(changed(SMALL.to_json(), version=version))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Graph)])
def test_a_missing_field_is_named(field: str) -> None:
    content = json.loads(SMALL.to_json())
    del content[field]
    with pytest.raises(InvalidFile, match=f"damaged graph: KeyError: '{field}'"):
        Graph.from_json(json.dumps(content))


@pytest.mark.parametrize("field", ["resident", "tangents", "held", "written_back"])
@pytest.mark.parametrize("index", [2, -1, 0.5, "0", None])
def test_an_index_out_of_range_is_named(field: str, index: object) -> None:
    with pytest.raises(InvalidFile, match=f"damaged graph: ValueError: storage {index!r} of 2"):
        Graph.from_json(changed(SMALL.to_json(), **{field: [index]}))


@pytest.mark.parametrize("field", ["inputs", "outputs"])
def test_an_index_out_of_range_inside_an_operation_is_named(field: str) -> None:
    operation = json.loads(SMALL.to_json())["operations"][0] | {field: [7]}
    with pytest.raises(InvalidFile, match="storage 7 of 2"):
        Graph.from_json(changed(SMALL.to_json(), operations=[operation]))


def test_overwriting_what_is_not_there_is_named() -> None:
    operation = json.loads(SMALL.to_json())["operations"][0] | {"overwrites": 7}
    with pytest.raises(InvalidFile, match="storage 7 of 2"):
        Graph.from_json(changed(SMALL.to_json(), operations=[operation]))


@pytest.mark.parametrize("trained", [[[0, 2]], [[0]], [0], 1])
def test_a_damaged_pair_of_parameter_and_gradient_is_refused(trained: object) -> None:
    with pytest.raises(InvalidFile, match="damaged graph"):
        Graph.from_json(changed(SMALL.to_json(), trained=trained))


@pytest.mark.parametrize("replacement", [{"kind": "scratch"}, {"color": "red"}, {"shape": 3}])
def test_a_damaged_storage_is_refused(replacement: dict[str, object]) -> None:
    storage = json.loads(SMALL.to_json())["storages"][0] | replacement
    with pytest.raises(InvalidFile, match="damaged graph"):
        Graph.from_json(changed(SMALL.to_json(), storages=[storage, storage]))


@pytest.mark.parametrize("replacement", [{"size_bytes": "many"}, {"size_bytes": -8}])
def test_a_storage_without_a_real_size_is_refused(replacement: dict[str, object]) -> None:
    storage = json.loads(SMALL.to_json())["storages"][0] | replacement
    with pytest.raises(InvalidFile, match="damaged graph"):
        Graph.from_json(changed(SMALL.to_json(), storages=[storage, storage]))


@pytest.mark.parametrize(
    "instruction", [["send", 0], ["free"], ["free", -1], ["free", "x"], ["free", 0, 1], [], 3, None]
)
def test_a_damaged_instruction_is_refused(instruction: object) -> None:
    with pytest.raises(InvalidFile, match="damaged program"):
        Program.from_json(changed(LINE.to_json(), forward=[instruction]))


def test_errors_about_files_are_one_line() -> None:
    with pytest.raises(InvalidFile) as caught:
        Graph.from_json('{"format":\n"memfit.graph",\n')
    assert "\n" not in str(caught.value)


def test_a_wrapper_disappears_from_all_paths() -> None:
    inner = dataclasses.replace(
        SMALL,
        storages=(
            dataclasses.replace(SMALL.storages[0], name="net.layer.weight", module="net.layer"),
            dataclasses.replace(SMALL.storages[1], name="network", module="net"),
        ),
        operations=(dataclasses.replace(SMALL.operations[0], module="net.layer"),),
    )
    bare = ir.without_prefix(inner, "net")
    assert [(storage.name, storage.module) for storage in bare.storages] == [("layer.weight", "layer"), ("network", "")]
    assert bare.operations[0].module == "layer"


def test_what_is_read_later_or_stays_is_not_overwritable() -> None:
    names = ("given", "one", "two", "three", "four")
    storages = tuple(
        Storage(name=name, size_bytes=8, kind=Kind.TEMPORARY, dtype="float32", shape=(2,), module="") for name in names
    )

    def operation(name: str, reads: int, makes: int) -> Operation:
        return Operation(
            name=name,
            target="aten.relu.default",
            phase=Phase.FORWARD,
            inputs=(reads,),
            outputs=(makes,),
            may_overwrite=reads,
        )

    graph = Graph(
        storages=storages,
        operations=(operation("a", 0, 1), operation("b", 1, 2), operation("c", 1, 3), operation("d", 3, 4)),
        alternatives=(operation("like c", 1, 3), operation("like b", 1, 2)),
        resident=(0,),
        tangents=(),
        held=(4, 2),
    )
    assert graph.overwritable() == {"c", "d", "like c"}
