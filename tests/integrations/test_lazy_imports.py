"""Tools are imported when they are used, and a tool that is missing is said so."""

import subprocess
import sys

import pytest

import memfit


def test_memfit_imports_no_tool_by_itself() -> None:
    code = (
        "import sys, memfit\n"
        "assert 'transformers' in dir(memfit.integrations)\n"
        "sys.exit(bool({'transformers', 'lightning', 'accelerate', 'peft'} & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_tool_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "memfit.integrations.lightning", raising=False)
    monkeypatch.delitem(vars(memfit.integrations), "lightning", raising=False)  # delattr would import it
    monkeypatch.setitem(sys.modules, "lightning", None)
    for name in [name for name in sys.modules if name.startswith("lightning.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(memfit.InvalidInput, match=r"memfit\[lightning\]"):
        _ = memfit.integrations.lightning
    with pytest.raises(AttributeError):
        _ = memfit.integrations.keras
