"""What Inductor finds out once before its first kernel, found out beside other work.

Note [Believed until a kernel fails]
    For each set of vector instructions that the processor has, Inductor compiles programs to see whether the compiler
    and torch have them as well: seven seconds of eight that the first kernel takes. Kernels are such programs
    themselves. So what the processor has is believed; if a kernel cannot be compiled or loaded, Inductor looks for
    itself, and the kernel is compiled again.

Rests on `VecISA.check_build`, which compiles such a program; on `valid_vec_isa_list` and the `__bool__` of its classes,
which remember what they found; on `load_pybinding_async` of `CppPythonBindingsCodeCache`, which compiles the headers of
kernels first and without `submit_fn` nothing else. A second thread that asks meanwhile only does the same again.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator
from typing import Any

_NO_KERNEL = "// The headers of kernels were compiled for this.\n"


@functools.cache
def start_compiler() -> threading.Thread:
    """Begin to find it out; join what is returned before the first kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about torch's own ways
        # Not in the thread: traces patch what is imported.
        from torch._inductor.codecache import CppPythonBindingsCodeCache
        from torch._inductor.cpu_vec_isa import pick_vec_isa

    def find_out() -> None:
        with contextlib.suppress(Exception):  # whatever it is, compiling says it again
            with _believing():
                pick_vec_isa()
            CppPythonBindingsCodeCache.load_pybinding_async([], _NO_KERNEL)

    thread = threading.Thread(target=find_out, daemon=True, name="memfit-compiler")
    thread.start()
    return thread


@contextlib.contextmanager
def _believing() -> Iterator[None]:
    """See Note [Believed until a kernel fails]."""
    from torch._inductor.cpu_vec_isa import VecAMX, VecISA

    own = VecISA.check_build
    newest = (VecAMX._amx_code, VecAMX._amx_fp16_code)  # processors have them that compilers of their days do not know

    def check(self: VecISA, code: str) -> bool:
        return own(self, code) if code in newest else True

    VecISA.check_build = check  # type: ignore[method-assign]
    try:
        yield
    finally:
        VecISA.check_build = own  # type: ignore[method-assign]


@functools.cache
def believe_no_more() -> None:
    """Let Inductor look for itself, once: a kernel has failed."""
    from torch._inductor import cpu_vec_isa

    if start_compiler.cache_info().currsize:
        start_compiler().join()
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    for each in vars(cpu_vec_isa).values():
        if isinstance(each, type) and issubclass(each, cpu_vec_isa.VecISA):
            for remembered in vars(each).values():
                _forget(remembered)


def _forget(remembered: Any) -> None:
    if hasattr(remembered, "cache_clear"):
        remembered.cache_clear()
