"""What is found out before the first kernel: instructions are believed until a kernel fails."""

from collections.abc import Iterator

import pytest
from torch._inductor import codecache, cpu_vec_isa
from torch._inductor.cpu_vec_isa import VecISA

from memfit import _compiler_start


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The programs by which Inductor looked for instructions; none is compiled, and all is as at the start."""
    programs: list[str] = []

    def check(_self: VecISA, code: str) -> bool:
        programs.append(code)
        return False

    _compiler_start.believe_no_more.__wrapped__()
    monkeypatch.setattr(VecISA, "check_build", check)
    yield programs
    monkeypatch.undo()
    _compiler_start.believe_no_more.__wrapped__()


def find_out() -> None:
    _compiler_start.start_compiler.__wrapped__().join()


@pytest.mark.skipif(not cpu_vec_isa.x86_isa_checker(), reason="there is nothing to look for")
def test_what_the_processor_has_is_believed_until_a_kernel_fails(looked_at: list[str]) -> None:
    find_out()
    assert VecISA._avx_code not in looked_at
    assert cpu_vec_isa.valid_vec_isa_list()
    _compiler_start.believe_no_more.__wrapped__()
    assert not cpu_vec_isa.valid_vec_isa_list()
    assert VecISA._avx_code in looked_at


@pytest.mark.usefixtures("looked_at")
def test_headers_are_compiled_for_the_kernels_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(codecache, "_precompile_header", lambda *args, **options: compiled.append((args, options)))
    codecache.CppPythonBindingsCodeCache.cache.clear()
    find_out()
    codecache.CppPythonBindingsCodeCache.load_pybinding_async(["float*"], "// another")
    assert len(compiled) == 2
    assert compiled[0] == compiled[1]


def test_whatever_goes_wrong_is_left_to_the_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", fail)
    find_out()
