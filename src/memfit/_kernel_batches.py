"""Kernels of Inductor compiled several at a time.

Note [In one go]
    A start of the C++ compiler takes half a second before it comes to the kernel: it reads Inductor's headers, compiled
    beforehand as they are, and links. So what waits for a compiler is compiled as one file. The library that comes of
    it stands in Inductor's cache once for each of its kernels, under the names that Inductor looks for, as links to one
    file; which kernel is meant it sees from the name under which it is loaded. Later processes find it as ever.

    Whatever fails that way is compiled one by one, by Inductor itself, which also looks whether all is there before it
    loads a kernel. So nothing here has to be right for kernels to be.

Rests on `AsyncCompile.submit` and `pool`, on what `CppPythonBindingsCodeCache` hands to them (a partial of
`_worker_compile_cpp` with a lock and one `CppBuilder`), and on the text of its sources: a function `kernel` and what
Python needs to call it, in a module that is named by the hash of the source and `kernel`.
"""

import collections
import contextlib
import functools
import logging
import math
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from memfit._whole_builds import folder_beside

log = logging.getLogger(__name__)

_MOST = 8  # kernels in one file: the other compilers should have something to do
_FEW = 4  # that are worth a start, and are not divided among compilers

_MODULE = """
static PyObject* memfit_create(PyObject* spec, PyModuleDef*) {{
    PyObject* name = PyObject_GetAttrString(spec, "name");
    const char* text = name == nullptr ? nullptr : PyUnicode_AsUTF8(name);
    PyObject* module = nullptr;
    if (text == nullptr) {{
    }}
{choices}    else PyErr_Format(PyExc_ImportError, "no kernel of this library is named %s", text);
    Py_XDECREF(name);
    return module;
}}
static PyModuleDef_Slot memfit_slots[] = {{{{Py_mod_create, (void*)memfit_create}}, {{0, nullptr}}}};
static PyModuleDef memfit_module = {{PyModuleDef_HEAD_INIT, "kernel", nullptr, 0, nullptr, memfit_slots}};
PyMODINIT_FUNC PyInit_kernel(void) {{ return PyModuleDef_Init(&memfit_module); }}
"""
_CHOICE = '    else if (std::strncmp(text, "{name}.", {length}) == 0) module = kernel_{number}::init_{number}();\n'
_KERNEL = """
#define kernel run_{number}
#define PyInit_kernel init_{number}
namespace kernel_{number} {{
#include "{source}"
}}
#undef kernel
#undef PyInit_kernel
"""
_HEADERS = """#include <torch/csrc/inductor/cpp_prefix.h>
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>
"""


class _Waiting(NamedTuple):
    """A kernel that waits for a compiler."""

    build: Callable[[], None]  # Inductor's own way
    lock: str  # Inductor's own, a file
    builder: Any  # its CppBuilder
    done: "Future[None]"

    @property
    def library(self) -> Path:
        return Path(self.builder.get_target_file_path())

    @property
    def source(self) -> Path:
        return self.library.with_suffix(".cpp")

    @property
    def name(self) -> str:
        """The hash that begins the name of its module."""
        return self.library.name.partition(".")[0]


class _Compilers:
    """Kernels that wait, and how many compilers there are.

    While kernels are written one processor is left to that, and compilers are not started for one kernel.
    """

    def __init__(self) -> None:
        self._unfinished: weakref.WeakSet[Future[None]] = weakref.WeakSet()
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._running = 0

    def forget(self) -> None:
        """A process that is forked has none of the threads that would take them: they are built when loaded."""
        for done in [each for each in self._unfinished if not each.done()]:
            done.set_result(None)
        self._begin()

    def add(self, kernel: _Waiting, pool: Any, threads: int) -> None:
        with self._lock:
            self._waiting.append(kernel)
            self._unfinished.add(kernel.done)
        self.start(pool, threads, most=threads - 1, least=_FEW)

    def start(self, pool: Any, threads: int, *, most: int, least: int = 1) -> None:
        """Have up to `most` compilers at work, if `least` kernels wait."""
        while self._may_start(most, least):
            try:
                pool.submit(self._work, threads)
            except BaseException:  # an interrupt too
                with self._lock:
                    self._running -= 1
                raise

    def _may_start(self, most: int, least: int) -> bool:
        with self._lock:
            starts = self._running < most and len(self._waiting) >= least
            self._running += starts
        return starts

    def _work(self, threads: int) -> None:
        while batch := self._next(threads):
            _compile(batch)

    def _next(self, threads: int) -> list[_Waiting]:
        """What is compiled next; nothing ends the work."""
        with self._lock:
            share = max(_FEW, math.ceil(len(self._waiting) / threads))
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), share, _MOST))]
            self._running -= not batch
        return batch


_COMPILERS = _Compilers()
_ONE_BY_ONE: set[str] = set()  # commands by which kernels could not be compiled together
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_COMPILERS.forget)


@contextlib.contextmanager
def in_batches() -> Iterator[None]:
    """Compile what Inductor compiles meanwhile several kernels at a time, see Note [In one go]."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    own = AsyncCompile.__dict__["submit"]  # as it stands in the class
    submit, here = AsyncCompile.submit, threading.get_ident()

    def collect(task: Callable[..., Any]) -> Any:
        kernel, threads = _as_kernel(task), get_compile_threads()
        if kernel is None or threads < 2 or threading.get_ident() != here:  # others do not ask for the rest
            return submit(task)
        _COMPILERS.add(kernel, AsyncCompile.pool(), threads)
        return kernel.done

    AsyncCompile.submit = staticmethod(collect)  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile.submit = own  # type: ignore[method-assign]


def compile_the_rest() -> None:
    """No more kernels are written for now: all processors are for those that wait."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    threads = get_compile_threads()
    if threads > 1:
        _COMPILERS.start(AsyncCompile.pool(), threads, most=threads)


def _as_kernel(task: Callable[..., Any]) -> _Waiting | None:
    """What Inductor wants to be compiled, if it is a kernel with nothing beside it."""
    if os.name != "posix" or not isinstance(task, functools.partial) or len(task.args) != 2:
        return None
    builders = task.args[1]
    if not isinstance(builders, tuple) or len(builders) != 1 or not hasattr(builders[0], "_build_option"):
        return None
    kernel = _Waiting(build=task, lock=str(task.args[0]), builder=builders[0], done=Future())
    return kernel if kernel.library.name.endswith(".main.so") and kernel.source.exists() else None


def _compile(batch: Sequence[_Waiting]) -> None:
    """Compile kernels, together where that can be done, and say of each that it is there, or why not."""
    try:
        for command, alike in _by_command(batch).items():
            if command not in _ONE_BY_ONE:
                _try_together(command, alike)
    except Exception as error:  # whatever it is, each is compiled by itself
        log.debug("%d kernels are compiled one by one: %s", len(batch), error)
    for kernel in batch:
        _finish(kernel)


def _by_command(batch: Sequence[_Waiting]) -> dict[str, list[_Waiting]]:
    """Kernels by how they are compiled, without what they are named."""
    found: dict[str, list[_Waiting]] = collections.defaultdict(list)
    for kernel in batch:
        command: str = kernel.builder.get_command_line()
        found[command.replace(str(kernel.library), "").replace(str(kernel.source), "")].append(kernel)
    return found


def _try_together(command: str, kernels: Sequence[_Waiting]) -> None:
    """Another process may be compiling the same: Inductor's locks are held meanwhile, in one order for all."""
    from torch._inductor.codecache import LOCK_TIMEOUT
    from torch.utils._filelock import FileLock

    with contextlib.ExitStack() as locks:
        for path in sorted(kernel.lock for kernel in kernels):
            locks.enter_context(FileLock(path, timeout=LOCK_TIMEOUT))
        missing = [kernel for kernel in kernels if not kernel.library.exists()]
        try:
            if len(missing) > 1:
                _compile_together(missing)
        except Exception:
            _ONE_BY_ONE.add(command)
            raise


def _finish(kernel: _Waiting) -> None:
    try:
        kernel.build()  # does nothing if it is there
    except BaseException as error:
        kernel.done.set_exception(error)
    else:
        kernel.done.set_result(None)


def _compile_together(kernels: Sequence[_Waiting]) -> None:
    from torch._inductor.cpp_builder import CppBuilder

    with folder_beside(kernels[0].library) as folder:
        source = folder / "kernels.cpp"
        source.write_text(source_of([(kernel.name, kernel.source) for kernel in kernels]), encoding="utf-8")
        options = kernels[0].builder._build_option
        builder = CppBuilder(name=source.stem, sources=str(source), BuildOption=options, output_dir=str(folder))
        builder.build()
        for number, kernel in enumerate(kernels):
            copy = folder / str(number)
            try:
                os.link(builder.get_target_file_path(), copy)
            except OSError:  # not every file system has links
                shutil.copy(builder.get_target_file_path(), copy)
            copy.replace(kernel.library)


def source_of(kernels: Sequence[tuple[str, Path]]) -> str:
    """One file that has all kernels; they come with the hashes that their modules are named by."""
    bodies = [_KERNEL.format(number=number, source=source) for number, (_, source) in enumerate(kernels)]
    choices = [
        _CHOICE.format(name=name, length=len(name) + 1, number=number) for number, (name, _) in enumerate(kernels)
    ]
    return "".join([_HEADERS, *bodies, _MODULE.format(choices="".join(choices))])
