"""Stretches by themselves: shared, named, compiled when needed, and right without a compiler."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.exc import InductorError

from memfit import _torch
from memfit._memory_events import memory_events
from memfit.measure import signature
from memfit.ops import stretch as stretch_module
from memfit.ops.registry import find_function, name_of
from memfit.ops.stretch import Stretch, compile_all, stretch_of

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))  # nor their kernels
    monkeypatch.setattr(stretch_module, "_STRETCHES", {})
    monkeypatch.setattr(stretch_module, "_SAID", set())


def graph_of(size: int = 6, factor: float = 2.0, results: int = 1) -> fx.Graph:
    """relu(x * factor) + y, and on request the product beside it."""
    with _torch.FakeTensorMode():
        values = [torch.empty(4, size), torch.empty(4, size)]
        graph = fx.Graph()
        one, other = graph.placeholder("one"), graph.placeholder("other")
        product = graph.call_function(aten.mul.Tensor, (one, factor))
        positive = graph.call_function(aten.relu.default, (product,))
        total = graph.call_function(aten.add.Tensor, (positive, other))
        graph.output([total, product][:results])
        for node, value in ((one, values[0]), (other, values[1])):
            node.meta["val"] = value
        for node in (product, positive, total):
            node.meta["val"] = torch.empty(4, size)
    return graph


def test_equal_graphs_share_a_stretch_and_others_do_not() -> None:
    assert stretch_of(graph_of()) is stretch_of(graph_of())
    kinds = [graph_of(), graph_of(size=7), graph_of(factor=3.0), graph_of(results=2)]
    assert len({stretch_of(graph) for graph in kinds}) == 4


def test_a_stretch_is_found_by_its_name_and_from_its_signature() -> None:
    made = stretch_of(graph_of())
    assert find_function(name_of(made)) is made
    found, args, _ = signature.decode(signature.encode(made, [torch.ones(4, 6), torch.ones(4, 6)], {}))
    assert found is made
    assert [arg.shape for arg in args] == [(4, 6), (4, 6)]
    assert find_function("memfit.stretch:0123456789abcdef") is None


def test_a_compiled_stretch_computes_and_allocates_its_results_alone() -> None:
    made = stretch_of(graph_of(results=2))
    one, other = torch.randn(4, 6), torch.randn(4, 6)
    total, product = made(one, other)
    assert made.is_compiled
    torch.testing.assert_close(total, (one * 2).relu() + other)
    torch.testing.assert_close(product, one * 2)
    kept: list[Any] = []
    events = memory_events(lambda: kept.append(made(one, other)))
    assert [each for each in events if each > 0] == [total.nbytes, product.nbytes]


def test_the_first_result_can_be_written_over_the_first_argument() -> None:
    made = stretch_of(graph_of(results=2))
    over = made.in_place
    assert over is not None
    assert over is made.in_place
    assert find_function(name_of(over)) is over
    one, other = torch.randn(4, 6), torch.randn(4, 6)
    expected = made(one, other)
    kept: list[Any] = []
    over(one.clone(), other)
    events = memory_events(lambda: kept.append(over(one, other)))
    assert [each for each in events if each > 0] == [one.nbytes]  # of the second result
    assert kept[0][0] is one
    for found, wanted in zip(kept[0], expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert over.is_compiled


def test_the_form_that_overwrites_stands_in_until_the_other_is_compiled() -> None:
    made = stretch_of(graph_of(results=2, factor=5.0))
    over = made.in_place
    assert over is not None
    assert made.stand_in is None
    compile_all([over])
    assert made.stand_in is over
    one, other = torch.randn(4, 6), torch.randn(4, 6)
    assert signature.decode(signature.encode(made, [one, other], {}))[0] is over  # costs are not taken for the other's
    before = one.clone()
    total, product = made(one, other)
    assert made.is_compiled
    assert made.stand_in is None
    assert signature.decode(signature.encode(made, [one, other], {}))[0] is made
    assert torch.equal(one, before)
    torch.testing.assert_close(total, (before * 5).relu() + other)
    torch.testing.assert_close(product, before * 5)


def test_where_the_form_that_overwrites_is_rejected_the_other_one_is_run_and_copied(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = _torch.compile_graph

    def refuse_to_overwrite(module: fx.GraphModule, inputs: Any) -> Any:
        if any(node.target is aten.copy_.default for node in module.graph.nodes):
            raise RuntimeError("not over what is read")
        return real(module, inputs)

    monkeypatch.setattr(_torch, "compile_graph", refuse_to_overwrite)
    made = stretch_of(graph_of(results=2, factor=7.0))
    over = made.in_place
    assert over is not None
    one, other = torch.randn(4, 6), torch.randn(4, 6)
    expected = (one * 7).relu() + other
    written, product = over(one, other)
    assert written is one
    torch.testing.assert_close(written, expected)
    assert product.shape == (4, 6)
    assert made.is_compiled
    assert made.stand_in is None
    assert "copied over its first argument: RuntimeError: not over what is read" in caplog.text


def test_what_is_read_inside_is_not_written_over() -> None:
    graph = graph_of(results=2)
    results = graph.output_node().args[0]
    graph.output_node().args = ([results[1], results[0]],)  # the product first, which the sum reads
    assert stretch_of(graph).in_place is None


def test_one_result_comes_as_it_is() -> None:
    assert isinstance(stretch_of(graph_of())(torch.ones(4, 6), torch.ones(4, 6)), torch.Tensor)


def test_without_a_compiler_operators_run_one_by_one_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler was found\nand more")

    monkeypatch.setattr(_torch, "compile_graph", refuse)
    made = stretch_of(graph_of())
    one, other = torch.randn(4, 6), torch.randn(4, 6)
    assert torch.equal(made(one, other), (one * 2).relu() + other)
    assert not made.is_compiled
    assert "3 operators runs with eager kernels: RuntimeError: no C++ compiler was found" in caplog.text


def test_a_kernel_that_does_not_compile_is_given_up_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("the compiler ended with 1")

    monkeypatch.setattr(_torch, "compile_graph", lambda *_: (list, fail))
    made = stretch_of(graph_of())
    one, other = torch.randn(4, 6), torch.randn(4, 6)
    assert torch.equal(made(one, other), (one * 2).relu() + other)
    assert made.failure == "RuntimeError: the compiler ended with 1"


def failing_first(error: Exception, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done, where the first kernel fails by an error."""
    done: list[str] = []
    compile_graph = _torch.compile_graph

    def compiled(*args: Any) -> Any:
        done.append("compiled")
        if len(done) == 1:
            raise error
        return compile_graph(*args)

    @contextlib.contextmanager
    def fresh() -> Iterator[None]:
        done.append("without files")
        yield

    monkeypatch.setattr(_torch, "compile_graph", compiled)
    monkeypatch.setattr(_torch, "fresh_kernel_cache", fresh)
    return done


@pytest.mark.parametrize("is_inductor_s", [False, True])
@pytest.mark.parametrize(
    ("finds_others", "expected", "kept"),
    [(True, ["compiled", "compiled"], 1), (False, ["compiled", "without files", "compiled"], 0)],
)
def test_a_kernel_that_fails_is_compiled_for_other_instructions_or_without_files(
    is_inductor_s: bool,
    finds_others: bool,
    expected: list[str],
    kept: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error: Exception = ImportError("undefined symbol: Sleef_expf16_u10")
    done = failing_first(InductorError(error, None) if is_inductor_s else error, monkeypatch)
    monkeypatch.setattr(stretch_module, "believe_no_more", lambda: finds_others)
    made = stretch_of(graph_of())
    one, other = torch.randn(4, 6), torch.randn(4, 6)
    assert torch.equal(made(one, other), (one * 2).relu() + other)
    assert made.is_compiled
    assert done == expected
    assert len(list(tmp_path.rglob("*.json"))) == kept


def test_each_is_compiled_once_and_the_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Stretch] = []

    def note(self: Stretch) -> None:
        compiled.append(self)
        self._run, self._threads = list, torch.get_num_threads()

    monkeypatch.setattr(Stretch, "start_compiling", note)
    one, other = stretch_of(graph_of()), stretch_of(graph_of(size=7))
    told: list[tuple[int, int]] = []
    compile_all([one, other, one], lambda done, total: told.append((done, total)))
    compile_all([one])
    assert compiled == [one, other]
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
