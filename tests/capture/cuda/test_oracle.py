"""Operators of a CUDA device, as CPU tensors are traced, are those that torch itself traces on fake CUDA tensors.

A CPU wheel of torch can trace on them, backward pass and autocast included, in a process whose torch believes in a
device: see `fake_cuda.cpp`. It has no kernels of CUDA, so attention is written out on both sides, and recurrent layers
are left out; what CUDA's kernels of these make is tested against its sources in `test_cuda_operators.py`.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle_steps import DTYPES, FAMILIES, STANDARD, step_bytes
from torch.utils import cpp_extension

from memfit.cli.torchvision_repair import prepare

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is here, g++ or clang++, to build a fake device with"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA itself, so a fake device is in its way"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prepare()
    built = tmp_path_factory.mktemp("fake_cuda") / "fake_cuda.so"
    folders = cpp_extension.library_paths()
    command = [COMPILER, "-shared", "-fPIC", "-std=c++20", "-o", built, HERE / "fake_cuda.cpp"]
    command += [f"-I{folder}" for folder in cpp_extension.include_paths()]
    command += [flag for folder in folders for flag in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    subprocess.run([*map(str, command), "-ltorch_cpu", "-lc10"], check=True, timeout=300)
    return built


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", [*STANDARD, *FAMILIES])
def test_a_step_makes_what_it_makes_on_fake_cuda_tensors(library: Path, name: str, precision: str) -> None:
    command = [sys.executable, "-W", "ignore", str(HERE / "oracle_steps.py"), str(library), precision, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    there, here = json.loads(done.stdout.splitlines()[-1])[name], step_bytes(name, precision, "cpu")
    assert here["made"] == there["made"]
    assert here == there
