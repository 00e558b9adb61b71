import dataclasses
import json
from pathlib import Path

import pytest
from handmade_frontier import EAGER_RUN, MIB, PEER_POINTS, point, record

from benchmarks.frontier_record import (
    CHECKPOINT,
    EAGER,
    INDUCTOR,
    MEMFIT,
    CaseRecord,
    MemfitPoint,
    load,
    point_from_dict,
    save,
)
from memfit.errors import InvalidFile


def test_fractions_are_of_the_activation_part_alone() -> None:
    assert EAGER_RUN.activation_bytes == 1000 * MIB
    assert EAGER_RUN.budget_bytes(0.33) == pytest.approx(430 * MIB)
    assert EAGER_RUN.fraction(600 * MIB) == 0.5


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    infeasible = MemfitPoint(fraction=0.33, reason="no plan fits", is_infeasible=True)
    records = {
        "ResNet-50 x16": record(point(0.66), infeasible, point(None)).with_finished(MEMFIT, quick=False),
        "UNet x2": CaseRecord(case="UNet x2"),
    }
    save(tmp_path / "frontier.json", records, {"torch": "2.13"})
    assert load(tmp_path / "frontier.json") == records
    assert json.loads((tmp_path / "frontier.json").read_text())["torch"] == "2.13"


def test_no_file_is_no_records(tmp_path: Path) -> None:
    assert load(tmp_path / "frontier.json") == {}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": "memfit.frontier", "version": 99, "cases": []}', '{"format": "memfit.plan"}']
)
def test_a_file_of_another_kind_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "frontier.json"
    path.write_text(text)
    with pytest.raises(InvalidFile, match="holds no figures of this benchmark"):
        load(path)
    assert path.read_text() == text


def test_points_go_to_their_part_and_others_stay() -> None:
    whole = CaseRecord(case="UNet x2")
    for each in (EAGER_RUN, point(0.66), *PEER_POINTS):
        whole = whole.with_point(each)
    again = whole.with_finished(CHECKPOINT, quick=False).with_finished(INDUCTOR, quick=False).without(CHECKPOINT)
    assert again.eager == EAGER_RUN
    assert again.memfit == whole.memfit
    assert {each.peer for each in again.peers} == {each.peer for each in PEER_POINTS} - {CHECKPOINT}
    assert not again.is_finished(CHECKPOINT, quick=True)
    assert again.is_finished(INDUCTOR, quick=False)
    assert whole.without(MEMFIT).memfit == ()
    assert whole.without(EAGER).eager is None


def test_a_quick_part_does_for_a_quick_run_only() -> None:
    quick = CaseRecord(case="UNet x2").with_finished(MEMFIT, quick=True)
    assert quick.is_finished(MEMFIT, quick=True)
    assert not quick.is_finished(MEMFIT, quick=False)
    assert quick.with_finished(MEMFIT, quick=False).is_finished(MEMFIT, quick=True)


def test_points_are_read_by_the_part_they_come_from() -> None:
    for part, each in ((EAGER, EAGER_RUN), (MEMFIT, point(None)), (CHECKPOINT, PEER_POINTS[0])):
        assert point_from_dict(part, json.loads(json.dumps(dataclasses.asdict(each)))) == each
