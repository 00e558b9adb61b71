"""Kernels found by their files, without Inductor: what is written down, and what is asked of Inductor all the same."""

import ast
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from memfit import _kept_kernels, _torch
from memfit._kept_kernels import _names_of_kernels, keep_kernel, kept_kernel, place_of
from memfit.files import read_checked, write_checked
from memfit.ops.stretch import Stretch, compile_all, digest_of

aten = torch.ops.aten

CODE = '''
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.no_such_module import maybe_profile as profile
async_compile = AsyncCompile()
cpp_fused_0 = async_compile.cpp_pybinding(["const float*"], r"""
extern "C" void kernel() {}
""")
async_compile.wait(globals())
del async_compile

class Runner:
    def call(self, args):
        (one,) = args
        args.clear()
        return (one + cpp_fused_0(one), )

call = Runner().call
'''

HASH = hashlib.sha256(b"a library").hexdigest()


class Library:
    """Stands for one that is loaded."""

    @staticmethod
    def kernel(value: Any) -> Any:
        return 2 * value


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path / "memfit"))
    return tmp_path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An Inductor's cache that has what was written down of one stretch."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    cache = tmp_path / "inductor"
    cache.mkdir()
    (cache / "code.py").write_text(CODE)
    monkeypatch.setitem(sys.modules, "cabc.kernel", Library)
    write_down()
    return cache


def write_down(**changed: Any) -> None:
    found = {"code": "code.py", "hash": hashlib.sha256(CODE.encode()).hexdigest()}
    write_checked(
        place_of("some"), found | {"kernels": {"cpp_fused_0": ["cabc.kernel", "cabc.main.so", HASH]}} | changed
    )


@pytest.mark.usefixtures("cache")
def test_code_runs_without_what_it_imports_of_inductor() -> None:
    call = kept_kernel(place_of("some"))
    assert call is not None
    values = [torch.ones(2)]
    (made,) = call(values)
    assert made.tolist() == [3.0, 3.0]
    assert values == []
    assert kept_kernel(place_of("other")) is None


def test_code_that_was_changed_is_left_alone(cache: Path) -> None:
    (cache / "code.py").write_text(CODE + "\nraise SystemExit")
    assert kept_kernel(place_of("some")) is None
    (cache / "code.py").unlink()
    assert kept_kernel(place_of("some")) is None


@pytest.mark.usefixtures("cache")
def test_code_elsewhere_is_left_alone(folder: Path) -> None:
    (folder / "code.py").write_text(CODE)
    for place in ("../code.py", str(folder / "code.py")):
        write_down(code=place)
        assert kept_kernel(place_of("some")) is None


@pytest.mark.usefixtures("cache")
def test_libraries_elsewhere_are_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("importlib.util.spec_from_file_location", lambda *args: asked.append(args))
    (folder / "library.so").write_bytes(b"a library")
    write_down(kernels={"cpp_fused_0": ["other.kernel", "../library.so", HASH]})
    assert kept_kernel(place_of("some")) is None
    assert asked == []


@pytest.mark.parametrize("content", [b"", b"no libra", b"b library", b"a library"])
def test_a_library_that_cannot_be_loaded_is_left_to_inductor(
    content: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "cabc.kernel")
    library = cache / "cabc.main.so"
    library.write_bytes(content)
    assert kept_kernel(place_of("some")) is None
    assert "cabc.kernel" not in sys.modules
    assert library.exists() == (content == b"a library")  # what is not what it was is not for Inductor either


@pytest.mark.usefixtures("cache")
def test_what_is_damaged_is_said(caplog: pytest.LogCaptureFixture) -> None:
    place_of("some").write_text(place_of("some").read_text().replace("code.py", "other.py"))
    assert kept_kernel(place_of("some")) is None
    assert "damaged" in caplog.text


@pytest.mark.usefixtures("cache")
def test_what_was_written_otherwise_is_left_alone() -> None:
    write_checked(place_of("some"), ["code.py"])
    assert kept_kernel(place_of("some")) is None


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "setting", [{"force_disable_caches": True}, {"fx_graph_cache": False}, {"post_grad_custom_pre_pass": print}]
)
def test_where_inductor_would_not_look_nothing_is_found(setting: dict[str, Any]) -> None:
    with torch._inductor.config.patch(setting):
        write_down()
        assert kept_kernel(place_of("some")) is None
    assert kept_kernel(place_of("some")) is not None


def test_what_kernels_depend_on_is_part_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {place_of("some")}
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        names.add(place_of("some"))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        names.add(place_of("some"))
    with monkeypatch.context() as patch:
        patch.setattr(_kept_kernels, "processor", lambda: "another one")
        names.add(place_of("some"))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_default_dtype", lambda: torch.float64)
        names.add(place_of("some"))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        names.add(place_of("some"))
    with torch.compiler.config.patch(cache_key_tag="another"):  # type: ignore[attr-defined]
        names.add(place_of("some"))
    assert len(names) == 7
    assert place_of("some") in names


@pytest.mark.parametrize(
    ("line", "used"),
    [
        ("extern_kernels.mm(1, 2)", "extern_kernels"),
        ("profile()", "profile"),
        ("triton_0 = async_compile.triton('')", "triton"),
    ],
)
def test_code_that_uses_more_of_inductor_is_not_written_down(line: str, used: str) -> None:
    assert _names_of_kernels(ast.parse(CODE)) == ["cpp_fused_0"]
    with pytest.raises(ValueError, match=f"uses {used}"):
        _names_of_kernels(ast.parse(f"{CODE}\n{line}"))


def test_kernels_without_a_name_are_not_written_down() -> None:
    with pytest.raises(ValueError, match="without a name"):
        _names_of_kernels(ast.parse(f"{CODE}\nkernels = [async_compile.cpp_pybinding([], '')]"))


@pytest.mark.parametrize("call", [lambda values: values, None, torch.nn.Linear(2, 2).forward])
def test_other_functions_are_not_written_down(call: Any, folder: Path) -> None:
    keep_kernel(place_of("some"), call)
    assert not list(folder.rglob("*.json"))


def stretch() -> Stretch:
    graph = fx.Graph()
    with _torch.FakeTensorMode():
        value = torch.empty(5, 7)
    one = graph.placeholder("one")
    product = graph.call_function(aten.mul.Tensor, (one, 0.8125))
    result = graph.call_function(aten.exp.default, (product,))
    graph.output([result])
    for node in (one, product, result):
        node.meta["val"] = value
    return Stretch(graph, digest_of(graph))


def computed(made: Stretch) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(made(x), (x * 0.8125).exp())
    assert made.is_compiled


@pytest.mark.slow
def test_what_was_compiled_is_found_without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = stretch(), stretch()
    compile_all([first])
    computed(first)
    (place,) = read_checked(place_of(first.__name__))["kernels"].values()
    assert place[0] in sys.modules
    monkeypatch.setattr(_torch, "compile_graph", None)  # not called again
    computed(second)


def test_it_is_written_down_for_what_it_was_compiled_with(monkeypatch: pytest.MonkeyPatch) -> None:
    made, place = stretch(), place_of(stretch().__name__)
    made.start_compiling()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        made.finish_compiling()
        assert kept_kernel(place_of(made.__name__)) is None
    assert kept_kernel(place) is not None


def test_what_was_compiled_without_the_cache_is_not_written_down(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = _torch.compile_graph

    def damaged(*args: Any) -> Any:
        monkeypatch.setattr(_torch, "compile_graph", own)
        raise OSError("a file is damaged")

    monkeypatch.setattr(_torch, "compile_graph", damaged)
    monkeypatch.setattr("memfit.ops.stretch.believe_no_more", lambda: False)
    made = stretch()
    compile_all([made])
    computed(made)
    assert "compiled anew" in caplog.text
    assert not list(folder.rglob("*.json"))


def test_a_later_process_does_not_import_inductor() -> None:
    compile_all([stretch()])
    code = "from tests.test_kept_kernels import *; computed(stretch()); print(json.dumps([*sys.modules]))"
    job = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=True, timeout=300)
    imported = set(json.loads(job.stdout))
    assert not imported & {
        "torch._inductor.compile_fx",
        "torch._inductor.select_algorithm",
        "torch.utils.cpp_extension",
    }


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(folder / "file"))
    made = stretch()
    compile_all([made])
    computed(made)
    assert kept_kernel(place_of(made.__name__)) is None
