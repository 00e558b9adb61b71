"""What Inductor finds out once before its first kernel, found out beside other work.

Note [Believed until a kernel fails]
    For each set of vector instructions that the processor has, Inductor compiles programs to see whether the compiler
    and torch have them as well: seven seconds of eight that the first kernel takes. Kernels are such programs
    themselves. So what the processor has is believed, for torch.compile in the same process too; if a kernel cannot be
    compiled or loaded, Inductor looks for itself, and the kernel is compiled again. Matrix instructions (AMX) are
    newer than many compilers, and looked for as ever.

Note [Graphs by instructions]
    Inductor keeps graphs under keys that do not name the instructions, and code that has their width in it. Compiled
    for others such code would compute nonsense without an error, so the keys are given them.

Rests on `VecISA.check_build`, which compiles such a program; on `valid_vec_isa_list` and the `__bool__` of its classes,
which remember what they found; on `load_pybinding_async` of `CppPythonBindingsCodeCache`, which compiles the headers of
kernels first and without `submit_fn` nothing else; on `cache_key_tag`. A second thread that asks meanwhile does that
again and nothing else.
"""

import contextlib
import contextvars
import functools
import threading
import warnings
from collections.abc import Iterator

from memfit._whole_builds import build_whole_files

_NO_KERNEL = "// The headers of kernels were compiled for this.\n"
_LOCK = threading.Lock()


def start_compiler() -> threading.Thread:
    """Begin to find it out, once; join what is returned before the first kernel."""
    with _LOCK:
        return _started()


@functools.cache
def _started() -> threading.Thread:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about torch's own ways
        # Not in the thread: traces patch what is imported.
        from torch._inductor.codecache import CppPythonBindingsCodeCache
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        build_whole_files()

    def find_out() -> None:
        with contextlib.suppress(Exception):  # whatever it is, compiling says it again
            with _believing():
                pick_vec_isa()
            CppPythonBindingsCodeCache.load_pybinding_async([], _NO_KERNEL)

    settings = contextvars.copy_context()  # of Inductor, as they are for the caller
    thread = threading.Thread(target=settings.run, args=(find_out,), daemon=True, name="memfit-compiler")
    thread.start()
    return thread


@contextlib.contextmanager
def _believing() -> Iterator[None]:
    """For this thread, see Note [Believed until a kernel fails]."""
    from torch._inductor.cpu_vec_isa import VecAMX, VecISA

    own, here = VecISA.check_build, threading.get_ident()
    newest = (VecAMX._amx_code, VecAMX._amx_fp16_code)

    def check(self: VecISA, code: str) -> bool:
        is_asked = code in newest or threading.get_ident() != here
        return own(self, code) if is_asked else True

    VecISA.check_build = check  # type: ignore[method-assign]
    try:
        yield
    finally:
        VecISA.check_build = own  # type: ignore[method-assign]


def instructions() -> str:
    """Those that kernels are written for, as the compiler is told them; "" if that cannot be said."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    try:
        chosen = pick_vec_isa()
        return f"{chosen} {chosen.build_arch_flags()}".strip()
    except Exception:  # there is no compiler
        return ""


@functools.cache
def believe_no_more() -> bool:
    """Let Inductor look for itself, once: a kernel has failed. Whether it finds something else than was believed."""
    start_compiler().join()
    believed = instructions()
    _forget()
    return instructions() != believed


def _forget() -> None:
    """What was found or believed."""
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    for each in vars(cpu_vec_isa).values():
        if isinstance(each, type) and issubclass(each, cpu_vec_isa.VecISA):
            for remembered in vars(each).values():
                if hasattr(remembered, "cache_clear"):
                    remembered.cache_clear()
    for isa in cpu_vec_isa.supported_vec_isa_list:
        for newer in ("_is_avx512_bf16_supported", "_is_amx_fp16_supported"):
            vars(isa).pop(newer, None)
