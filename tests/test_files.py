import os
from pathlib import Path

import pytest

from memfit.files import hash_of, read_checked, write_atomically, write_checked


def test_the_text_is_written(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.json", "ö {}\n")
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "ö {}\n"


def test_missing_folders_are_made(tmp_path: Path) -> None:
    write_atomically(tmp_path / "one" / "two" / "a.json", "x")
    assert (tmp_path / "one" / "two" / "a.json").read_text() == "x"


def test_old_content_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    for text in ("a much longer first text", "second"):
        write_atomically(tmp_path / "a.json", text)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "second")]


def test_what_cannot_be_encoded_midway_leaves_the_old_content_and_no_temporary(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.json", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "a.json", "new " * 10_000 + "\ud800")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failed_replacement_leaves_the_old_content_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    write_atomically(tmp_path / "a.json", "old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(error)):
        write_atomically(tmp_path / "a.json", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]


def test_a_new_file_can_be_read_by_those_who_may_read_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour").write_text("")
    write_atomically(tmp_path / "a.json", "x")
    assert (tmp_path / "a.json").stat().st_mode == (tmp_path / "neighbour").stat().st_mode


def test_what_was_written_with_a_hash_is_read_again(tmp_path: Path) -> None:
    write_checked(tmp_path / "a.json", {"one": [1, None, "ö"]})
    assert read_checked(tmp_path / "a.json") == {"one": [1, None, "ö"]}
    assert read_checked(tmp_path / "b.json") is None


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"0" * 64 + b"\n{}"])
def test_what_is_not_what_was_written_is_left_out_and_said(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.json").write_bytes(content)
    assert read_checked(tmp_path / "a.json") is None
    assert "is damaged" in caplog.text


def test_equal_contents_have_equal_hashes() -> None:
    assert hash_of([1, ("a", None)]) == hash_of([1, ["a", None]]) != hash_of([1, ["b", None]])
