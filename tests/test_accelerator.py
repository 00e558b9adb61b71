"""Whether a device is an accelerator is asked in one place; on one that is simulated: `tests/accelerator`."""

import ast
from pathlib import Path

import torch

import memfit
from memfit import accelerator

SOURCE = Path(memfit.__file__).parent


def test_nobody_else_asks_cuda() -> None:
    asking = {path.name for path in SOURCE.rglob("*.py") if _asks_cuda(ast.parse(path.read_text(encoding="utf-8")))}
    assert asking <= {"accelerator.py"}


def _asks_cuda(tree: ast.AST) -> bool:
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "cuda"]
    return any(isinstance(each, ast.Name) and each.id == "torch" for each in found)


def test_a_cpu_is_none() -> None:
    assert not accelerator.is_accelerator("cpu")
    assert not accelerator.is_accelerator("meta")
    assert accelerator.is_accelerator("cuda:1")
    assert accelerator.accelerator_of([torch.zeros(1)]) is None
    assert accelerator.indexed("cuda:1") == torch.device("cuda", 1)
    assert accelerator.initialized_accelerators() == []
    assert set(accelerator.generator_states([])) == {"cpu"}


def test_blocks_are_rounded_up() -> None:
    assert [accelerator.blocks_bytes(each) for each in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_generators_are_put_back() -> None:
    with accelerator.generators_kept([]):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), inside)


def test_autocast_is_off_for_a_while() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with accelerator.without_autocast():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
