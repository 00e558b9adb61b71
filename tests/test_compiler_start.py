"""What is found out before the first kernel: instructions are believed until a kernel fails."""

import shutil
from collections.abc import Iterator

import pytest
import torch._inductor.config
from torch._inductor import codecache, cpu_vec_isa
from torch._inductor.cpu_vec_isa import VecISA

from memfit import _compiler_start, _torch


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The programs by which Inductor looked for instructions; none is compiled, and all is as at the start."""
    programs: list[str] = []

    def check(_self: VecISA, code: str) -> bool:
        programs.append(code)
        return False

    monkeypatch.setattr(VecISA, "check_build", check)
    _compiler_start._forget()
    yield programs
    monkeypatch.undo()
    _compiler_start._forget()
    find_out()


def find_out() -> None:
    _compiler_start._started.__wrapped__().join()


@pytest.mark.skipif(not cpu_vec_isa.x86_isa_checker(), reason="there is nothing to look for")
def test_what_the_processor_has_is_believed_until_a_kernel_fails(looked_at: list[str]) -> None:
    find_out()
    assert VecISA._avx_code not in looked_at
    assert cpu_vec_isa.valid_vec_isa_list()
    believed = _compiler_start.instructions()
    assert _compiler_start.believe_no_more.__wrapped__()
    assert VecISA._avx_code in looked_at
    assert not cpu_vec_isa.valid_vec_isa_list()
    assert _compiler_start.instructions() != believed
    assert not _compiler_start.believe_no_more.__wrapped__()


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("simdlen", [None, 256])
def test_headers_are_compiled_for_the_kernels_that_follow(simdlen: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(codecache, "_precompile_header", lambda *args, **options: compiled.append((args, options)))
    codecache.CppPythonBindingsCodeCache.cache.clear()
    with torch._inductor.config.patch({"cpp.simdlen": simdlen}):
        find_out()
        codecache.CppPythonBindingsCodeCache.load_pybinding_async(["float*"], "// another")
    assert len(compiled) == 2
    assert compiled[0] == compiled[1]


def test_whatever_goes_wrong_is_left_to_the_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", fail)
    find_out()


def test_graphs_are_kept_by_the_instructions_they_are_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tags = set()
    for each in ("avx2", "avx512"):
        monkeypatch.setattr(_torch, "instructions", lambda each=each: each)
        with _torch._known_by_instructions():
            tags.add(torch.compiler.config.cache_key_tag)
    assert len(tags) == 2
