import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from memfit import _torch
from memfit.capture import stretches
from memfit.capture.kept_graphs import keep_graph, kept_graph
from memfit.capture.stretches import _primitive
from memfit.ops.stretch import digest_of
from memfit.tensors import tensors_in

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(stretches, "_PRIMITIVE", {})
    return tmp_path


def normalised(x: torch.Tensor) -> Any:
    weight = torch.ones(4)
    return aten.native_batch_norm(x, weight, weight, weight.clone(), weight.clone(), True, 0.1, 1e-5)


def turned(x: torch.Tensor) -> Any:
    half = x.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    return (torch.nn.functional.gelu(half.float()) * float("inf"), aten._softmax(x, 1, False))


def traced(function: Callable[..., Any]) -> tuple[fx.Graph, _torch.FakeTensorMode]:
    """A graph of the operators that a function calls, with a list of results."""
    mode = _torch.FakeTensorMode()
    with mode:
        graph = make_fx(function)(torch.empty(2, 4, 6, 6)).graph
    results: Any = graph.output_node().args[0]
    graph.output_node().args = (list(results),)
    return graph, mode


def reads(graph: fx.Graph) -> list[Any]:
    return [(node.op, node.name, str(node.target), str(node.args), str(node.kwargs)) for node in graph.nodes]


def looks(graph: fx.Graph) -> list[Any]:
    made = [tensors_in(node.meta.get("val")) for node in graph.nodes]
    return [[(each.dtype, each.shape, each.stride(), each.device) for each in some] for some in made]


@pytest.mark.parametrize("function", [normalised, turned])
def test_a_later_process_finds_what_was_decomposed(function: Callable[..., Any], monkeypatch: Any) -> None:
    graph, mode = traced(function)
    with mode:
        first, places = _primitive(graph)
        monkeypatch.setattr(stretches, "_PRIMITIVE", {})
        monkeypatch.setattr(_torch, "decomposed", None)  # not called again
        second, same_places = _primitive(graph)
    assert second is not first
    assert places == same_places
    assert reads(second) == reads(first)
    assert looks(second) == looks(first)
    assert digest_of(second) == digest_of(first)


def test_it_computes_the_same() -> None:
    graph, mode = traced(turned)
    with mode:
        first, _ = _primitive(graph)
        keep_graph("some", first)
        second = kept_graph("some")
    assert second is not None
    x = torch.randn(2, 4, 6, 6)
    for one, other in zip(fx.GraphModule({}, first)(x), fx.GraphModule({}, second)(x), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize(
    "change", [lambda text: text[:-20], lambda text: text.replace("aten.", "prims."), lambda _: ""]
)
def test_a_damaged_file_is_left_out_and_said(
    folder: Path, change: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    graph, mode = traced(turned)
    keep_graph("some", graph)
    (path,) = folder.rglob("some.json")
    path.write_text(change(path.read_text()))
    with mode:
        assert kept_graph("some") is None
    assert "damaged" in caplog.text


def test_a_file_of_another_make_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, mode = traced(turned)
    keep_graph("some", graph)
    monkeypatch.setattr(torch, "__version__", "1.0")
    with mode:
        assert kept_graph("some") is None


@pytest.mark.parametrize("name", ["prim.device.default", "aten.no_such_operator.default", "aten"])
def test_names_are_looked_up_among_the_operators_only(name: str, folder: Path) -> None:
    import hashlib

    graph, mode = traced(turned)
    keep_graph("some", graph)
    (path,) = folder.rglob("some.json")
    text = path.read_text().partition("\n")[2].replace("aten._softmax.default", name)
    path.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
    with mode:
        assert kept_graph("some") is None


def test_what_decompositions_ask_for_is_part_of_the_name() -> None:
    graph, mode = traced(turned)
    keep_graph("some", graph)
    torch.use_deterministic_algorithms(True)
    try:
        with mode:
            assert kept_graph("some") is None
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_is_not_plain_is_not_kept(folder: Path) -> None:
    graph = fx.Graph()
    value = graph.placeholder("value")
    with _torch.FakeTensorMode():
        value.meta["val"] = torch.empty(2)
    called = graph.call_function(nn.functional.relu, (value,))
    called.meta["val"] = value.meta["val"]
    graph.output([called])
    keep_graph("some", graph)
    assert not list(folder.rglob("some.json"))
    assert kept_graph("some") is None


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path / "file"))
    graph, _ = traced(turned)
    keep_graph("some", graph)
    assert kept_graph("some") is None


def test_several_results_of_one_operator_are_kept() -> None:
    graph, mode = traced(lambda x: list(aten.var_mean.correction(x, [0], correction=0)))
    assert any(node.target is operator.getitem for node in graph.nodes)
    keep_graph("some", graph)
    with mode:
        again = kept_graph("some")
    assert again is not None
    assert reads(again) == reads(graph)
