from pathlib import Path

import pytest
from handmade_frontier import EAGER_RUN, MIB, PEER_POINTS, point, record

from benchmarks.frontier_record import CaseRecord
from benchmarks.plots import memfit_curves, peer_curve, plot_case, plot_path


def test_curves_are_fractions_of_the_activation_part_and_percents() -> None:
    curves = memfit_curves(record(point(0.66, measured_bytes=740 * MIB), point(None)), EAGER_RUN)
    assert curves["measured"] == (pytest.approx([0.2, 0.64]), [6.0, 6.0])
    assert curves["predicted"] == (pytest.approx([0.2, 0.66]), [5.0, 5.0])
    assert curves["bound"] == (pytest.approx([0.2, 0.66]), [4.0, 4.0])
    fractions, slowdowns = peer_curve(PEER_POINTS[4:], EAGER_RUN)
    assert fractions == [0.4]
    assert slowdowns == pytest.approx([-10])


def test_a_picture_is_written_and_small(tmp_path: Path) -> None:
    path = plot_path(tmp_path / "plots", "ViT-B/16 x4")
    plot_case(record(point(0.66), point(0.40), point(None)), path)
    assert path.name == "vit-b-16-x4.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 100_000


def test_there_is_no_picture_without_an_eager_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no eager run"):
        plot_case(CaseRecord(case="UNet x2"), tmp_path / "unet.png")
