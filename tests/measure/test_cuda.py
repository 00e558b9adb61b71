import pytest
import torch
from torch import nn

import memfit
from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.measure.cuda import with_byte_masks


def graph_of(model, batch):
    with traced(model, Sample.of(batch)) as joint:
        return lower(joint)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_of_dropout_are_counted_with_one_byte_a_value(dtype):
    graph = graph_of(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(dtype), torch.randn(4, 8, dtype=dtype))
    masks = [storage for storage in with_byte_masks(graph).storages if storage.dtype == "bool"]
    assert {storage.size_bytes for storage in masks} == {32}
    assert any(storage.kind == "activation" for storage in masks)


def test_without_dropout_nothing_changes():
    graph = graph_of(nn.Linear(8, 8), torch.randn(4, 8))
    assert with_byte_masks(graph) == graph


def test_an_estimate_for_a_cuda_device_has_them():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    estimate = memfit.estimate(model, torch.randn(8, 64), device="A100-40GB")
    assert any(storage.dtype == "bool" for storage in estimate.graph.storages)
