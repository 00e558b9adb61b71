"""Imports flow downwards only. Read from the source, so that a lazy import counts as well."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memfit

SOURCE = Path(memfit.__file__).parent
BENCHMARKS = SOURCE.parents[1] / "benchmarks"

DATA = {
    "alone",
    "accelerator",
    "transfers",
    "errors",
    "units",
    "files",
    "ir",
    "tensors",
    "trees",
    "collectives",
    "collecting",
    "display",
    "spelling",
    "optimizer_twin",
    "_compiler_start",
    "_kernel_cache",
    "_kernel_batches",
    "_whole_builds",
    "_kept_kernels",
    "_memory_events",
    "machine",
    "malloc",
    "kept",
    "progress",
}
BELOW_CAPTURE = DATA | {"_torch", "ops", "measure"}
PIPELINE = {
    "describe",
    "internal",
    "recipe",
    "outside_loss",
    "prepare",
    "partial_loss",
    "process_budget",
    "shortage",
    "pipeline",
}
BELOW_API = (
    BELOW_CAPTURE
    | PIPELINE
    | {
        "plan",
        "estimate",
        "capture",
        "execute",
        "remembered",
        "trial",
        "layout",
        "ways",
        "runner",
        "regions",
        "unplanned",
    }
)
BELOW_STEP = BELOW_API | {"api", "prove"}
BELOW_REPORT = BELOW_STEP | {"step", "multilevel", "distributed", "integrations", "zoo", "doctor"}

MAY_IMPORT = {
    "alone": set(),
    "accelerator": {"errors"},
    "transfers": {"accelerator"},
    "errors": set(),
    "units": {"errors"},
    "files": {"errors"},
    "ir": {"errors", "files"},
    "tensors": set(),
    "trees": set(),
    "collectives": set(),
    "collecting": set(),
    "optimizer_twin": {"errors"},
    "_compiler_start": {"_whole_builds"},
    "_kernel_cache": set(),
    "_kernel_batches": {"_whole_builds"},
    "_whole_builds": set(),
    "_kept_kernels": {"errors", "files", "machine"},
    "_memory_events": {"accelerator", "errors"},
    "machine": set(),
    "malloc": set(),
    "progress": set(),
    "kept": {"files"},
    "display": set(),
    "spelling": set(),
    "_torch": DATA,
    "_backward_pass": set(),
    "ops": DATA | {"_torch"},
    "measure": DATA | {"_torch", "ops"},
    "plan": {"errors", "units", "files", "ir", "display"},
    "capture": BELOW_CAPTURE,
    "execute": BELOW_CAPTURE | {"capture", "_backward_pass"},
    "estimate": BELOW_CAPTURE | {"plan"},
    "describe": BELOW_CAPTURE | {"capture"},
    "internal": BELOW_CAPTURE | {"capture", "execute", "describe"},
    "recipe": BELOW_CAPTURE | {"plan"},
    "outside_loss": BELOW_CAPTURE | {"plan", "capture", "execute", "describe", "recipe"},
    "prepare": BELOW_CAPTURE | {"plan", "capture", "execute", "describe", "recipe", "outside_loss"},
    "partial_loss": BELOW_CAPTURE | {"plan", "capture", "execute", "describe", "recipe", "outside_loss", "prepare"},
    "process_budget": BELOW_CAPTURE | {"plan", "capture", "describe", "recipe", "prepare"},
    "shortage": {"errors", "ir", "units"},
    "pipeline": BELOW_CAPTURE | PIPELINE | {"plan", "capture", "execute"},
    "unplanned": BELOW_CAPTURE | PIPELINE | {"plan", "estimate", "capture", "execute"},
    "remembered": BELOW_CAPTURE | {"plan", "capture", "describe", "recipe"},
    "runtime_probe": BELOW_API | {"api"},
    "trial": BELOW_CAPTURE | {"capture", "execute", "describe", "recipe"},
    "layout": BELOW_CAPTURE | {"plan", "capture", "describe", "recipe", "prepare", "trial"},
    "ways": BELOW_CAPTURE | {"plan", "recipe"},
    "runner": BELOW_CAPTURE | PIPELINE | {"plan", "capture", "execute", "remembered", "trial", "layout", "ways"},
    "regions": BELOW_CAPTURE | PIPELINE | {"plan", "capture", "execute", "estimate", "runner"},
    "api": BELOW_API,
    "prove": BELOW_API | {"api"},
    "step": BELOW_STEP,
    "distributed": BELOW_STEP | {"step"},
    "multilevel": BELOW_STEP | {"step", "distributed"},
    "integrations": BELOW_STEP | {"step"},
    "zoo": BELOW_STEP | {"step"},
    "doctor": {"errors", "units", "collecting", "plan"},
    "report": BELOW_REPORT,
    "cli": BELOW_REPORT | {"report"},
}

MODULES = {
    ".".join(("memfit", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}


def imported_names(path: Path, module: str = "") -> Iterator[str]:
    """Dotted names a file imports, wherever in it; `from a import b` counts as `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def imported_modules(module: str) -> set[str]:
    """The modules of memfit that one of them imports."""
    found = set()
    for name in imported_names(MODULES[module], module):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {"", module}


def part_of(module: str) -> str:
    """`memfit.capture.trace` is of the part `capture`; the package itself of none."""
    return ".".join(module.split(".")[1:2])


def closure(module: str) -> set[str]:
    """All modules of memfit that a module needs, itself included."""
    needed, waiting = set(), [module]
    while waiting:
        current = waiting.pop()
        if current not in needed:
            needed.add(current)
            waiting += imported_modules(current)
    return needed


@pytest.mark.parametrize("module", [name for name in MODULES if name != "memfit"])
def test_a_module_imports_only_from_parts_below_its_own(module: str) -> None:
    part = part_of(module)
    assert part in MAY_IMPORT, f"say in this test where the part {part!r} belongs"
    upwards = {name for name in imported_modules(module) if part_of(name) not in MAY_IMPORT[part] | {part}}
    assert not upwards


@pytest.mark.parametrize(
    "module", [name for name in MODULES if part_of(name) in {"plan", "ir", "units", "errors", "doctor"}]
)
def test_the_planner_and_its_data_need_no_torch(module: str) -> None:
    roots = {name.partition(".")[0] for needed in closure(module) for name in imported_names(MODULES[needed], needed)}
    assert not roots & {"torch", "functorch", "torchvision", "transformers"}


def test_the_planner_runs_without_torch() -> None:
    planner = [name for name in MODULES if part_of(name) in {"plan", "ir"}]
    code = (
        "import sys, types, importlib; package = types.ModuleType('memfit'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['memfit'] = package  # without running its __init__, which needs torch\n"
        "for name in sys.argv[2:]: importlib.import_module(name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(SOURCE), *planner], check=True)


def test_the_reader_of_imports_sees_what_there_is() -> None:
    assert "memfit._torch" in imported_modules("memfit.capture.trace")
    assert {"memfit.ir", "memfit.plan.simulate"} <= closure("memfit.api")
    assert "torch" in {name.partition(".")[0] for name in imported_names(MODULES["memfit.capture.trace"])}


@pytest.mark.parametrize("module", MODULES)
def test_the_package_does_not_need_what_stands_around_it(module: str) -> None:
    roots = {name.partition(".")[0] for name in imported_names(MODULES[module], module)}
    assert not roots & {"benchmarks", "tests", "examples", "pytest", "hypothesis"}


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: path.name)
def test_benchmarks_take_nothing_from_the_command_line_but_the_repair_of_torchvision(path: Path) -> None:
    taken = {name for name in imported_names(path) if name.startswith("memfit.cli")}
    assert all(name.startswith("memfit.cli.torchvision_repair") for name in taken)
