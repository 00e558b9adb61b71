import argparse
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "transformer_ptb.py"


@pytest.fixture(scope="module")
def example(one_thread):
    specification = importlib.util.spec_from_file_location("transformer_ptb", EXAMPLE)
    module = importlib.util.module_from_spec(specification)
    sys.modules["transformer_ptb"] = module
    specification.loader.exec_module(module)
    module.plan_seconds = 1.0
    return module


def test_a_penn_treebank_file_is_read_line_by_line(example, tmp_path):
    (tmp_path / "ptb.train.txt").write_text(" no it was n't black monday \n but while the <unk>\n")
    words = example.penn_treebank(tmp_path)
    assert words == ["no", "it", "was", "n't", "black", "monday", "<eos>", "but", "while", "the", "<unk>", "<eos>"]
    assert example.penn_treebank(tmp_path / "ptb.train.txt") == words
    with pytest.raises(SystemExit, match="there is no file"):
        example.penn_treebank(tmp_path / "nowhere")


def test_targets_are_the_next_words(example):
    numbers = torch.arange(400)
    words, next_words = next(example.batches(numbers, 4))
    assert words.shape == (4, example.sequence)
    assert torch.equal(words + 1, next_words)


def test_all_ways_compute_the_same_and_memfit_takes_no_more_than_segments(example):
    options = argparse.Namespace(layers=4, runs=1, epochs=1, batches=1)
    numbers = example.numbered(example.generated_text(2_000))
    setting = example.Setting(batch_size=32, hidden=64, segment=2, with_selected_layers=False)
    ways = example.measured_ways(setting, numbers, options)
    assert [way.name for way in ways] == ["none", "segments of 2", "memfit"]
    none, segments, planned = ways
    assert none.losses == segments.losses == planned.losses
    assert planned.peak_bytes <= segments.peak_bytes < none.peak_bytes
    rows = list(example.rows_of(setting, ways))
    assert rows[0]["less"] == "0%"
    assert "| checkpointing |" in example.table(rows)


@pytest.mark.parametrize("kind", ["LayerNorm", "attention"])
def test_layers_can_be_selected(example, kind):
    sample = next(example.batches(torch.arange(4000) % example.vocabulary, 16))
    model = example.LanguageModel(64, 1).train()
    eager = model(*sample).item()
    torch.manual_seed(0)
    eager = model(*sample).item()
    fitted = example.by_layer(example.selected_layers[kind])(model, sample)
    torch.manual_seed(0)
    assert fitted(*sample).item() == eager
