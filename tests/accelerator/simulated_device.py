"""Build and load an accelerator that is none, for tests: see `device/memory.h` and `device/operators.cpp`.

It is named `simulated`, has two devices with memory that is counted and limited, streams and events whose order is
checked, pinned memory, generators and autocast. A process that loads it has it for good: `conftest.py` gives its tests
processes of their own.
"""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import types
from pathlib import Path
from typing import Any

import platformdirs
import torch

NAME = "simulated"
_DEVICES = 2
_SOURCES = Path(__file__).parent / "device"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")


def compiler() -> str | None:
    """Find a compiler; None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


@functools.cache
def built() -> Path:
    """Compile what has changed since it was compiled last, and return the library."""
    from torch.utils.cpp_extension import include_paths, library_paths

    found = compiler()
    assert found is not None
    sources = sorted(_SOURCES.glob("*.*"))
    content = b"".join(each.read_bytes() for each in sources) + f"{torch.__version__} {_FLAGS}".encode()
    folder = Path(platformdirs.user_cache_dir("memfit-tests"))
    library = folder / f"simulated-{hashlib.sha256(content).hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be compiling it
        if not library.exists():
            _compile(found, sources, library, include_paths(), library_paths())
    return library


def _compile(found: str, sources: list[Path], library: Path, headers: list[str], libraries: list[str]) -> None:
    fresh = library.with_suffix(f".{os.getpid()}")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    objects = []
    running = []
    for source in sources:
        if source.suffix == ".cpp":
            made = fresh.with_suffix(f".{os.getpid()}.{source.stem}.o")
            flags = [each for each in _FLAGS if each != "-shared"]
            command = [found, *flags, abi, "-c", str(source), "-o", str(made), *(f"-I{each}" for each in headers)]
            running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
            objects.append(made)
    for process in running:
        _, said = process.communicate()
        if process.returncode:
            raise RuntimeError(f"the simulated device does not compile: {said[-4000:]}")
    places = [flag for each in libraries for flag in (f"-L{each}", f"-Wl,-rpath,{each}")]
    linked = [found, *_FLAGS, *map(str, objects), "-o", str(fresh), *places, "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(linked, check=True, capture_output=True, text=True)
    for each in objects:
        each.unlink()
    fresh.replace(library)


@functools.cache
def load() -> types.ModuleType:
    """Make the device known to torch in this process."""
    torch.ops.load_library(str(built()))
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    for name, function in _functions().items():
        setattr(module, name, function)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module


def _functions() -> dict[str, Any]:
    ops = torch.ops.simulated

    def index(device: Any = None) -> int:
        place = torch.device(NAME, device) if isinstance(device, int) else torch.device(device or NAME)
        return torch.accelerator.current_device_index() if place.index is None else place.index

    def manual_seed_all(seed: int) -> None:
        for each in range(_DEVICES):
            ops.seed(seed % 2**63, each)

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: _DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "synchronize": torch.accelerator.synchronize,
        "manual_seed": lambda seed: ops.seed(seed, index()),
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device=None: ops.rng_state(index(device)),
        "set_rng_state": lambda state, device=None: ops.set_rng_state(state, index(device)),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_device_name": lambda device=None: "a device that is simulated",
    }


def set_capacity(size_bytes: int, device: int = 0) -> None:
    """Give a device so much memory."""
    torch.ops.simulated.set_capacity(size_bytes, device)


def taken_log() -> list[str]:
    """Return what copies, events and streams did since this was asked last."""
    return str(torch.ops.simulated.taken_log()).splitlines()


def taken_races() -> list[str]:
    """Return what a real device could have done in another order, see Note [Clocks] in `device/memory.h`."""
    return str(torch.ops.simulated.taken_races()).splitlines()
