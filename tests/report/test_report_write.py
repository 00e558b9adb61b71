import io
import json
import sys

import pytest
from handmade_reports import make_profile
from handmade_story import STAGES, plan_of_chain, without_step

import memfit
from memfit.errors import InvalidFile, InvalidInput
from memfit.plan.frontier import Frontier
from memfit.report.write import FORMATS, format_of


@pytest.fixture(scope="module")
def plan():
    return plan_of_chain(STAGES)


@pytest.fixture
def plan_file(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


BEGINNINGS = {"html": b"<!DOCTYPE html>", "png": b"\x89PNG", "svg": b"<?xml", "gif": b"GIF89a"}


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_written_from_a_plan_and_from_its_file(plan, plan_file, tmp_path, kind):
    if kind != "html":
        pytest.importorskip("matplotlib")
    for number, source in enumerate((plan, plan_file)):
        path = memfit.report(source, tmp_path / f"{number}.{kind}")
        assert path.read_bytes().startswith(BEGINNINGS[kind])
    assert (tmp_path / f"0.{kind}").read_bytes() == (tmp_path / f"1.{kind}").read_bytes()


def test_a_film_moves_and_is_told_frame_by_frame(plan, tmp_path):
    image = pytest.importorskip("PIL.Image")
    told = []
    path = memfit.report(plan, tmp_path / "film.gif", progress=lambda done, total: told.append((done, total)))
    with image.open(io.BytesIO(path.read_bytes())) as film:
        assert film.n_frames == len(told) == len(plan.program.forward + plan.program.backward) - _frees(plan) + 1
        assert film.is_animated
    assert told[-1] == (len(told), len(told))


def _frees(plan):
    from memfit.ir import Free

    return sum(isinstance(each, Free) for each in (*plan.program.forward, *plan.program.backward))


def test_a_file_that_is_there_is_left_alone(plan, tmp_path):
    path = tmp_path / "report.html"
    path.write_text("mine")
    with pytest.raises(InvalidInput, match="is there already"):
        memfit.report(plan, path)
    assert path.read_text() == "mine"
    memfit.report(plan, path, overwrite=True)
    assert path.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[:-40], "not whole JSON"),
        (lambda text: text.replace('"model":"Net"', '"model":"Ned"'), "checksum differs"),
        (lambda text: text.replace('"version":3', '"version":9'), "version 9 was found"),
        (lambda text: "{}", "not a plan"),
    ],
)
def test_a_damaged_edited_or_newer_plan_is_refused_and_nothing_is_written(plan_file, tmp_path, damage, words):
    plan_file.write_text(damage(plan_file.read_text()))
    with pytest.raises(InvalidFile, match=words):
        memfit.report(plan_file, tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_without_matplotlib_pictures_say_what_is_missing_and_the_page_is_written(plan, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for kind in ("png", "svg", "gif"):
        with pytest.raises(InvalidInput, match=r"memfit\[plots\]"):
            memfit.report(plan, tmp_path / f"report.{kind}")
    memfit.report(plan, tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_an_old_plan_has_no_picture(plan, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(InvalidInput, match="no timeline to draw"):
        memfit.report(without_step(plan), tmp_path / "old.png")


def test_frontier_and_profile_come_from_objects_or_files(plan, tmp_path):
    frontier = Frontier.of([plan, plan_of_chain(STAGES, dropped=(1, 2, 3, 4))])
    profile = make_profile(predicted_peak_bytes=plan.peak_bytes)
    (tmp_path / "curve.json").write_text(frontier.to_json())
    (tmp_path / "profile.json").write_text(profile.to_json())
    one = memfit.report(plan, tmp_path / "1.html", frontier=frontier, profile=profile)
    files = {"frontier": tmp_path / "curve.json", "profile": str(tmp_path / "profile.json")}
    other = memfit.report(plan, tmp_path / "2.html", **files)
    assert one.read_text() == other.read_text()
    assert "this plan" in one.read_text()


def test_a_profile_of_another_plan_is_refused(plan, tmp_path):
    with pytest.raises(InvalidFile, match="profile is of another plan"):
        memfit.report(plan, tmp_path / "1.html", profile=make_profile())


@pytest.mark.parametrize("noun", ["frontier", "profile"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read as a"),
        ('{"format": "memfit.plan"}', "is not a"),
        ('{"format": "memfit.NOUN", "version": 7}', "of version 7"),
        ('{"format": "memfit.NOUN", "version": 1, "points": [{"peak_bytes": true}]}', "damaged"),
    ],
)
def test_a_damaged_file_beside_the_plan_is_refused(plan, tmp_path, noun, content, words):
    (tmp_path / "other.json").write_text(content.replace("NOUN", noun))
    with pytest.raises(InvalidFile, match=words):
        memfit.report(plan, tmp_path / "report.html", **{noun: tmp_path / "other.json"})
    assert not (tmp_path / "report.html").exists()


def test_an_unknown_format_is_refused(plan, tmp_path):
    with pytest.raises(InvalidInput, match="cannot be written as 'pdf'; write html, png, svg or gif"):
        memfit.report(plan, tmp_path / "report.pdf")
    assert format_of(tmp_path / "report.PNG", None) == "png"


def test_a_profile_is_the_same_after_a_round_trip(tmp_path):
    for profile in (make_profile(), make_profile(eager_peak_bytes=None, slowdown=None, budget_bytes=None)):
        (tmp_path / "profile.json").write_text(profile.to_json())
        assert memfit.Profile.load(tmp_path / "profile.json") == profile
    fields = json.loads(make_profile().to_json()) | {"peak_bytes": "many"}
    (tmp_path / "profile.json").write_text(json.dumps(fields))
    with pytest.raises(InvalidFile, match="peak_bytes is 'many'"):
        memfit.Profile.load(tmp_path / "profile.json")
