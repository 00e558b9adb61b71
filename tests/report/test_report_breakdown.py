import pytest
from handmade_estimate import make_estimate

from memfit.report import breakdown

STAGES = [f"stage{i}" for i in range(1, 6)]
DECODER = ["model.embed", *(f"model.layers.{i}.{part}" for i in range(8) for part in ("attn", "mlp")), "head"]
ENCODER = [*(f"embeddings.{part}" for part in "abcd"), *(f"encoder.layer.{i}" for i in range(8))]


def test_kinds_add_up_to_the_peak():
    estimate = make_estimate(STAGES)
    rows = breakdown.kind_rows(estimate)
    assert sum(row.size_bytes for row in rows) == estimate.peak_bytes
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert rows == sorted(rows, key=lambda row: -row.size_bytes)


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_modules_add_up_to_the_peak_however_few_are_shown(limit):
    estimate = make_estimate(DECODER)
    rows = breakdown.module_rows(estimate, depth=4, limit=limit)
    assert sum(row.size_bytes for row in rows) == estimate.peak_bytes
    assert len(rows) <= limit + 1 or limit == 100


def test_a_single_module_more_is_shown_rather_than_counted():
    rows = breakdown.module_rows(make_estimate(STAGES[:2]), depth=1, limit=2)
    assert not any("others" in row.label for row in rows)


@pytest.mark.parametrize(
    ("modules", "depth"),
    [
        (STAGES, 1),
        ([f"{stage}.{part}" for stage in STAGES for part in ("conv", "norm")], 1),
        (DECODER, 3),
        (ENCODER, 3),
        (["only"], 1),
        (["a.b.c"], 3),
        (["", ""], 1),
    ],
)
def test_the_automatic_depth_shows_the_blocks(modules, depth):
    assert breakdown.automatic_depth(make_estimate(modules)) == depth


def test_equal_blocks_share_a_row():
    labels = [row.label for row in breakdown.module_rows(make_estimate(DECODER))]
    assert any(label.startswith("model.layers.") and " of " in label for label in labels)


def test_what_belongs_to_no_module_is_named():
    labels = [row.label for row in breakdown.module_rows(make_estimate(STAGES))]
    assert breakdown.NO_MODULE in labels


def test_a_value_is_placed_by_its_name_or_by_what_made_it():
    rows = {row.kind: row for row in breakdown.value_rows(make_estimate(STAGES), 100)}
    assert rows["parameter"].place.endswith(".weight")
    assert rows["activation"].place in STAGES
    assert rows["activation"].source.startswith("net.py:")
    assert rows["activation"].shape == "1024"


def test_parameters_end_with_their_total():
    assert breakdown.parameter_rows(make_estimate(STAGES)) == [
        ("float32, trainable", 1000, 4000),
        ("bfloat16, frozen", 50, 100),
        ("total", 1050, 4100),
    ]


def test_the_place_of_the_peak():
    assert breakdown.peak_place(make_estimate(STAGES)) == "backward of stage5, operation backward_4"
    assert breakdown.peak_place(make_estimate([""])).startswith("backward of the model itself")


def test_the_batch_and_the_step_are_named():
    assert breakdown.batch_words(make_estimate(STAGES)) == "512 float32"
    assert breakdown.step_words(make_estimate(STAGES)) == "training step with sgd"
    assert breakdown.step_words(make_estimate(STAGES, state_bytes=0)) == "forward and backward"


def test_names_cannot_steer_a_terminal():
    estimate = make_estimate(["evil\x1b[2J\n", *STAGES], notes=("a\x07note",))
    texts = [row.label for row in breakdown.module_rows(estimate)]
    texts += [row.place for row in breakdown.value_rows(estimate, 100)]
    texts += breakdown.note_lines(estimate)
    assert any("evil?[2J?" in text for text in texts)
    assert all(text.isprintable() for text in texts)
