from typing import Any

import pytest
from handmade_frontier import MIB, PEER_POINTS, point, record

from benchmarks.frontier_record import AOT_EAGER, CHECKPOINT, INDUCTOR, MemfitPoint
from benchmarks.frontier_verdict import allowed_slowdown, best_peer, checks, model_name, monet, pareto


def missed(*points: MemfitPoint, **options: Any) -> list[str]:
    return [check.promise for check in checks(record(*points, **options)) if not check.is_kept]


def test_a_point_that_keeps_every_promise_misses_none() -> None:
    assert missed(point(0.66), point(0.53), point(0.33), point(None)) == []


@pytest.mark.parametrize(
    ("fraction", "changes", "promise"),
    [
        (0.66, {"measured_bytes": 775 * MIB}, "measured peak within the budget"),
        (0.66, {"predicted_slowdown": 0.061}, "near the lower bound"),
        (0.40, {"predicted_slowdown": 0.071, "measured_slowdown": 0.08}, "near the lower bound"),
        (0.46, {"measured_slowdown": 0.081}, "within 3 points"),
        (0.46, {"measured_slowdown": 0.019}, "within 3 points"),
        (0.46, {"plan_s": 15.1}, "planned within 15 s"),
        (0.46, {"differing": ["gradients"], "largest_difference": 2e-6}, "equal to eager"),
        (None, {"measured_bytes": 351 * MIB, "budget_bytes": 351 * MIB}, "smallest budget"),
    ],
)
def test_a_promise_that_is_not_kept_is_named(fraction: float | None, changes: dict[str, Any], promise: str) -> None:
    (found,) = missed(point(fraction, **changes))
    assert promise in found


def test_one_hundredth_over_the_budget_and_a_millionth_off_are_allowed() -> None:
    assert missed(point(0.40, measured_bytes=505 * MIB)) == []
    assert missed(point(0.40, differing=["gradients"], largest_difference=9e-7)) == []


def test_the_smallest_budget_is_promised_for_some_models_only() -> None:
    assert missed(point(None, measured_bytes=500 * MIB, budget_bytes=500 * MIB), case="UNet x2") == []


def test_no_slowdown_is_promised_between_the_fractions_and_at_the_smallest() -> None:
    assert allowed_slowdown(0.46, 0.1) is None
    assert allowed_slowdown(None, 0.1) is None
    assert allowed_slowdown(0.53, 0.1) == pytest.approx(0.135)
    assert allowed_slowdown(0.33, 0.1) == pytest.approx(0.16)


def test_a_smaller_budget_with_a_larger_peak_is_missed_whatever_lies_between() -> None:
    points = (
        point(0.66, measured_bytes=500 * MIB),
        point(0.60, measured_bytes=502 * MIB),
        point(0.53, measured_bytes=506 * MIB),
    )
    (check,) = [each for each in checks(record(*points)) if not each.is_kept]
    assert "never measures a larger peak" in check.promise
    assert check.where == "ResNet-50 x16 at 0.53"


def test_a_budget_below_the_floor_is_a_result_and_any_other_failure_is_missed() -> None:
    assert missed(MemfitPoint(fraction=0.33, reason="no plan fits", is_infeasible=True)) == []
    assert missed(MemfitPoint(fraction=0.33, reason="ValueError: no")) == ["every budget has a plan or a floor"]


def test_the_best_peer_is_the_fastest_that_needs_no_more() -> None:
    promised = (CHECKPOINT, AOT_EAGER)
    settings = {
        peak: getattr(best_peer(PEER_POINTS, peak * MIB, promised), "setting", None) for peak in (399, 400, 650, 700)
    }
    assert settings == {
        399: None,
        400: "17 segments of 1 block",
        650: "5 segments of 4 blocks",
        700: "budget 0.5",
    }
    assert best_peer(PEER_POINTS, 2000 * MIB, [INDUCTOR]) == PEER_POINTS[4]


def test_being_slower_than_a_peer_at_the_same_peak_is_missed_and_inductor_is_another_game() -> None:
    slow = {"measured_slowdown": 0.11, "predicted_slowdown": 0.10, "lower_bound": 0.08}
    (check,) = [each for each in checks(record(point(0.60, **slow))) if not each.is_kept]
    assert "never slower than checkpoint" in check.promise
    assert check.found == f"-1.0 points ahead of {AOT_EAGER} budget 0.5"
    assert missed(point(0.60, **slow), peers=PEER_POINTS[4:]) == []


def test_only_settings_that_nothing_else_beats_are_on_the_front() -> None:
    assert [each.setting for each in pareto(PEER_POINTS[:4])] == [
        "17 segments of 1 block",
        "5 segments of 4 blocks",
        "budget 0.5",
    ]


def test_published_figures_are_given_where_there_is_one_near() -> None:
    assert monet("ResNet-50 x16", 0.53) == (0.53, 5.56)
    assert monet("MobileNetV2 x16", 0.40) == (0.42, 7.55)
    assert monet("UNet x2", 0.66) is None
    assert monet("BERT x8", 0.66) is None
    assert monet("ResNet-50 x16", None) is None


def test_the_name_of_a_model_has_no_batch_size() -> None:
    assert model_name("ViT-B/16 x4") == "ViT-B/16"
