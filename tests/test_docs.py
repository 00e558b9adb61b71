"""Every Python block of README.md and docs/*.md is run, the blocks of a page in order."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from docs_preambles import PREAMBLES, Given

import memfit
import memfit.distributed
import memfit.multilevel

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```python[^\n]*\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"# Not run by the tests: (?P<reason>\S.+)")  # as the first line, where readers see it too
SLOW = {"README.md", "integrations.md"}  # imports of big tools, whole frontiers


@dataclass(frozen=True, kw_only=True)
class CodeBlock:
    """One fenced block of Python."""

    page: Path
    line: int  # of its first statement
    code: str

    @property
    def is_run(self) -> bool:
        return NOT_RUN.match(self.code) is None

    def run(self, namespace: dict[str, object], given: Given) -> None:
        """With line numbers of the page, so that a traceback points there."""
        tree = ast.parse("\n" * (self.line - 1) + self.code)
        mentioned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for name in sorted(mentioned - {*namespace}):
            if hasattr(type(given), name):
                namespace[name] = getattr(given, name)
        exec(compile(tree, str(self.page), "exec"), namespace)


def blocks_of(page: Path) -> list[CodeBlock]:
    text = page.read_text(encoding="utf-8")
    return [
        CodeBlock(page=page, line=text[: match.start("code")].count("\n") + 1, code=match["code"])
        for match in FENCE.finditer(text)
    ]


PAGES = [page for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if blocks_of(page)]


def marked(page: Path) -> object:
    return pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW else [])


@pytest.mark.filterwarnings("default")  # what the tools of others warn about is tested where they are
@pytest.mark.parametrize("page", [marked(page) for page in PAGES])
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.chdir(tmp_path)
    preamble = PREAMBLES.get(page.name, Given)
    blocks = [block for block in blocks_of(page) if block.is_run]
    for together in [[block] for block in blocks] if preamble.each_block_alone else [blocks]:
        given, namespace = preamble(), {"__name__": page.stem}
        try:
            for block in together:
                block.run(namespace, given)
        finally:
            given.close()


def test_blocks_that_are_not_run_are_rare() -> None:
    left_out = [block for page in PAGES for block in blocks_of(page) if not block.is_run]
    assert len(left_out) <= 2, [f"{block.page.name}:{block.line}" for block in left_out]


def test_a_block_that_fails_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```python\nnumber = 1\n```\n\n```python\nassert number == 2\n```\n")
    first, second = blocks_of(page)
    namespace: dict[str, object] = {}
    first.run(namespace, Given())
    with pytest.raises(AssertionError) as caught:
        second.run(namespace, Given())
    assert caught.traceback[-1].lineno == second.line - 1  # pytest counts from 0


def pages_of(navigation: object) -> Iterator[str]:
    if isinstance(navigation, str):
        yield navigation
    elif isinstance(navigation, Mapping):
        yield from pages_of(list(navigation.values()))
    elif isinstance(navigation, list):
        for entry in navigation:
            yield from pages_of(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(pages_of(settings["nav"])) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_from_the_front_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if not (ROOT / link).exists()]


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("index.md", [name for name in memfit.__all__ if name != "zoo"]),
        ("multilevel.md", memfit.multilevel.__all__),
        ("distributed.md", memfit.distributed.__all__),
        ("zoo.md", memfit.zoo.__all__),
    ],
)
def test_the_reference_has_every_public_name(page: str, names: list[str]) -> None:
    text = (DOCS / "reference" / page).read_text(encoding="utf-8")
    described = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)", text, re.MULTILINE)}
    assert described == {*names}
