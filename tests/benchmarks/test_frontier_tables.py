import io

from handmade_frontier import EAGER_RUN, PEER_POINTS, point, record
from rich.console import Console
from rich.table import Table

from benchmarks.frontier_record import MemfitPoint
from benchmarks.frontier_tables import line, memfit_table, misses, peer_table, summary_table


def printed(table: Table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_budget_shows_its_figures_peers_and_the_published_mark() -> None:
    text = printed(memfit_table(record(point(0.60, differing=["loss"], largest_difference=1e-7), point(None))))
    for part in ("0.60", "700.0", "0.600", "+4.0%", "+5.0%", "+6.0%", "3.0", "loss to 1e-07", "smallest", "300.0"):
        assert part in text
    assert "aot_eager +10.0%" in text
    assert "inductor -10.0%" in text
    assert "+4.7% at 0.60" in text
    assert "none fits" in text


def test_a_budget_without_a_plan_shows_the_reason() -> None:
    assert "0.33: no plan fits [at all]" in printed(
        memfit_table(record(MemfitPoint(fraction=0.33, reason="no plan fits [at all]")))
    )


def test_peers_show_figures_or_reasons() -> None:
    text = printed(peer_table(record()))
    assert "+25.0%" in text
    assert "not done after 300 s" in text


def test_the_summary_counts_promises_and_says_where_they_are_missed() -> None:
    records = [record(point(0.66), point(0.60, plan_s=20.0), point(0.53, plan_s=20.0))]
    text = printed(summary_table(records))
    assert "1 of 3" in text
    assert "ResNet-50 x16 at 0.60" in text
    assert misses(records)[0] == "ResNet-50 x16 at 0.60: planned within 15 s: 20.0 s"


def test_every_kind_of_point_has_its_line() -> None:
    case = record()
    assert "1000.00 MiB activation part" in line(case, EAGER_RUN)
    assert "memfit at 0.66: 760.00 MiB of 760.00 MiB, +6.0% (predicted +5.0%)" in line(case, point(0.66))
    assert "17 segments of 1 block: +30.0% at 400.00 MiB" in line(case, PEER_POINTS[0])
    assert "not done after 300 s" in line(case, PEER_POINTS[-1])
