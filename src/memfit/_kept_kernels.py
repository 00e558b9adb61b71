"""Which of Inductor's files have the kernels of a stretch, so that a later process need not ask Inductor.

Note [Without Inductor]
    Inductor finds what it compiled by a hash of the graph, its settings and the compiler's command. To ask takes two
    seconds for the first graph, for what it imports and to see which instructions the processor has, and a tenth of
    that for ten others. So it is written down in which files the answer was: the Python code that Inductor wrote for a
    stretch, and the library of each kernel that it calls. The code is run again without what it imports of Inductor
    and does not use, and with kernels loaded as Inductor loads them.

    A stretch is found by its own hash and all that kernels depend on beside it. For whatever is missing, is not what it
    was, or cannot be loaded, Inductor is asked as ever. Code that uses more of Inductor than kernels in C++ is not
    written down.

Rests on the text of the modules that Inductor writes (`call`, `AsyncCompile.cpp_pybinding` and `wait`), on how its
`CppPythonBindingsCodeCache` loads a library, and on `cache_dir`.
"""

import ast
import hashlib
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch._inductor.runtime.cache_dir_utils import cache_dir

from memfit.errors import first_line
from memfit.files import cache_folder, hash_of, own_version, read_checked, write_checked
from memfit.machine import processor

log = logging.getLogger(__name__)

Kernel = Callable[[list[Any]], Sequence[Any]]

_FORMAT = 2  # to be raised when what is written down is read otherwise
_COMPILER = "AsyncCompile"  # the one name of Inductor's that code may use
_KERNEL = "cpp_pybinding"  # the method of it that compiles one
_OWN_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
    "inductor_choices_class",
)  # settings that are functions, whose code is part of what they do
_ADDRESS = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"  # where libraries look for the function behind it


def place_of(digest: str) -> Path:
    """Where it is written down for the graph with this hash, compiled as things are now."""
    return cache_folder() / "kernels" / _circumstances()[:16] / f"{digest}.json"


def keep_kernel(place: Path, call: Kernel) -> None:
    """Write down where Inductor keeps what it made of a graph; what cannot be is not an error."""
    try:
        if _may_be_kept():
            write_checked(place, _written(call))
    except Exception as error:  # whatever it is, the kernel is there
        log.debug("where a kernel is is not kept: %s", first_line(error))


def kept_kernel(place: Path) -> Kernel | None:
    """What Inductor made of a graph in an earlier process, if all of it is still there."""
    found = read_checked(place) if _may_be_kept() else None
    if found is None:
        return None
    try:
        return _read(found)
    except Exception as error:  # whatever it is, Inductor is asked
        log.debug("a kernel is not found by its files: %s", first_line(error))
        return None


def _may_be_kept() -> bool:
    """Whether Inductor may use its cache, and has nothing to do that only it can tell apart."""
    config = torch._inductor.config
    is_usual = all(getattr(config, name, None) is None for name in _OWN_PASSES)
    return is_usual and config.fx_graph_cache and not config.force_disable_caches


def _circumstances() -> str:
    """A hash of what kernels depend on beside their graphs."""
    words = [
        [_FORMAT, own_version(), torch.__version__, torch.version.git_version, sys.implementation.cache_tag],
        [processor(), os.cpu_count(), torch.get_num_threads()],
        [torch._inductor.config.get_hash().hex(), torch.compiler.config.cache_key_tag],
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        str(torch.get_default_dtype()),
    ]
    return hash_of(words)


def _written(call: Any) -> dict[str, Any]:
    scope = call.__func__.__globals__  # a method of what Inductor's module makes
    if scope.get("call") != call:
        raise ValueError("what is called is not what the module has")
    if any(isinstance(value, torch.Tensor) for value in scope.values()):
        raise ValueError("the code has constants beside it")
    source = Path(scope["__file__"]).read_bytes()
    kernels = _kernels(scope, _names_of_kernels(ast.parse(source)))
    return {"code": _below(scope["__file__"]), "hash": _hash_of(source), "kernels": kernels}


def _below(path: str) -> str:
    return Path(os.path.realpath(path)).relative_to(os.path.realpath(cache_dir())).as_posix()


def _names_of_kernels(code: ast.Module) -> list[str]:
    """What code has of Inductor's compiler; code that uses more of Inductor than kernels in C++ is refused."""
    lines: list[Any] = code.body
    names = {name.asname or name.name for line in lines if _is_inductors(line) for name in line.names}
    used = {node.id for node in ast.walk(code) if isinstance(node, ast.Name)}
    asked = [
        node.attr
        for node in ast.walk(code)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "async_compile"
    ]
    if needed := (names & used) - {_COMPILER} or {*asked} - {_KERNEL, "wait"}:
        raise ValueError(f"the code uses {', '.join(sorted(needed))}")
    kernels = [line.targets[0].id for line in lines if _is_kernel(line)]
    if len(kernels) != asked.count(_KERNEL):
        raise ValueError("the code has kernels without a name")
    return kernels


def _is_kernel(line: ast.stmt) -> bool:
    """Whether it gives a name to what is compiled."""
    made = line.value if isinstance(line, ast.Assign) else None
    return isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr == _KERNEL


def _is_inductors(line: ast.stmt) -> bool:
    """Whether it imports something of Inductor."""
    return isinstance(line, ast.ImportFrom) and (line.module or "").startswith("torch._inductor")


def _kernels(scope: dict[str, Any], names: Sequence[str]) -> dict[str, list[Any]]:
    """Where the kernels of a module come from, by the names that it has for them."""
    found: dict[str, list[Any]] = {}
    for name in names:
        if not isinstance(scope[name], types.BuiltinFunctionType):
            raise TypeError(f"{name} is not of a library")
        library: Any = scope[name].__self__
        found[name] = [library.__spec__.name, _below(library.__file__), _hash_of(Path(library.__file__).read_bytes())]
    return found


class _Loaded:
    """Stands for Inductor's compiler: all kernels are there."""

    def __init__(self, kernels: dict[str, Any]) -> None:
        self._kernels = kernels

    def cpp_pybinding(self, arguments: list[str], source: str) -> None:
        """Nothing is compiled."""

    def wait(self, scope: dict[str, Any]) -> None:
        scope.update(self._kernels)


def _read(found: dict[str, Any]) -> Kernel:
    path = _inside(found["code"])
    source = path.read_bytes()
    if _hash_of(source) != found["hash"]:
        raise ValueError(f"{path} is not what it was")
    kernels = {name: _library(*place).kernel for name, place in found["kernels"].items()}
    code = ast.parse(source)
    code.body = [line for line in code.body if not _is_inductors(line)]
    scope: dict[str, Any] = {"__name__": path.stem, "__file__": str(path), _COMPILER: lambda: _Loaded(kernels)}
    exec(compile(code, str(path), "exec"), scope)  # as Inductor does; it is the file that Inductor wrote
    call: Kernel = scope["call"]
    return call


def _inside(name: str) -> Path:
    root = os.path.realpath(cache_dir())
    path = Path(os.path.realpath(os.path.join(root, name)))
    if not path.is_relative_to(root):
        raise ValueError(f"{name} is not in Inductor's cache")
    return path


def _hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _library(module_name: str, place: str, expected: str) -> Any:
    if module_name in sys.modules:
        return sys.modules[module_name]
    path = _inside(place)
    if _hash_of(path.read_bytes()) != expected:
        path.unlink(missing_ok=True)  # or Inductor would load it
        raise ValueError(f"{path} is not what it was")
    os.environ[_ADDRESS] = str(torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr)  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[module_name] = module
    return module
