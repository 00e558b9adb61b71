"""Operators of CUDA devices in traces on a CPU: which are picked, and what they keep."""

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.capture.cuda.attention import Kernel, choose_kernel
from memfit.capture.cuda.capability import CAPABILITIES, find_capability
from memfit.capture.cuda.operators import operators_of
from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.errors import InvalidInput

AMPERE = find_capability((8, 0))


def targets(model, batch, device=AMPERE, *, autocast=None):
    cast = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
    with cast, operators_of(device), traced(model, Sample.of(batch), runs=False) as joint:
        return lower(joint)


def names(graph):
    return {each.target for each in graph.operations}


class Attention(nn.Module):
    def __init__(self, width=64, mask=False, dropout=0.0, causal=False):
        super().__init__()
        self.project = nn.Linear(width, 3 * width)
        self.mask, self.dropout, self.causal = mask, dropout, causal

    def forward(self, values):
        query, key, value = self.project(values).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(values.shape[1], values.shape[1], dtype=torch.bool).tril() if self.mask else None
        return F.scaled_dot_product_attention(query, key, value, mask, self.dropout, self.causal).sum()


@pytest.mark.parametrize(
    ("version", "dtype", "kernel"),
    [
        ((7, 0), torch.float16, "efficient"),
        ((7, 5), torch.bfloat16, "math"),
        ((8, 0), torch.float32, "efficient"),
        ((8, 0), torch.bfloat16, "flash"),
        ((8, 6), torch.float16, "flash"),
        ((9, 0), torch.bfloat16, "cudnn"),
        ((9, 0), torch.float32, "efficient"),
        ((12, 0), torch.bfloat16, "flash"),
    ],
)
def test_attention_by_capability_and_dtype(version, dtype, kernel):
    graph = targets(Attention().to(dtype), torch.randn(2, 16, 64, dtype=dtype), find_capability(version))
    fused = {name for name in names(graph) if "scaled_dot_product" in name and "backward" not in name}
    assert fused == (set() if kernel == "math" else {f"aten._scaled_dot_product_{kernel}_attention.default"})


def test_attention_keeps_no_probabilities():
    length = 128
    here = targets(Attention(dropout=0.1), torch.randn(2, length, 64), None)
    there = targets(Attention(dropout=0.1), torch.randn(2, length, 64))
    probabilities = 2 * 4 * length * length * 4
    assert any(each.size_bytes == probabilities for each in here.storages)
    assert all(each.size_bytes < probabilities for each in there.storages)


def test_a_mask_rules_flash_attention_out():
    graph = targets(Attention(mask=True).bfloat16(), torch.randn(2, 16, 64).bfloat16())
    assert "aten._scaled_dot_product_efficient_attention.default" in names(graph)


@pytest.mark.parametrize(
    ("version", "width", "dropout", "kernel"),
    [
        ((8, 0), 256, 0.1, Kernel.FLASH),
        ((8, 6), 200, 0.0, Kernel.EFFICIENT),
        ((8, 9), 256, 0.1, Kernel.EFFICIENT),
        ((8, 9), 256, 0.0, Kernel.FLASH),
        ((8, 0), 264, 0.0, Kernel.EFFICIENT),
        ((8, 0), 60, 0.0, Kernel.FLASH),
        ((9, 0), 256, 0.0, Kernel.CUDNN),
        ((10, 0), 256, 0.0, Kernel.FLASH),
        ((7, 0), 60, 0.0, Kernel.MATH),
    ],
)
def test_attention_by_the_width_of_heads(version, width, dropout, kernel):
    query = torch.randn(1, 2, 8, width, dtype=torch.float16, requires_grad=True)
    assert choose_kernel(find_capability(version), query, query, query, None, dropout, False, False) is kernel


def test_grouped_heads_and_unequal_lengths():
    query, key = torch.randn(1, 4, 8, 64).half(), torch.randn(1, 2, 8, 64).half()
    assert choose_kernel(AMPERE, query, key, key, None, 0.0, False, True) is Kernel.FLASH
    assert choose_kernel(AMPERE, query.float(), key.float(), key.float(), None, 0.0, False, True) is Kernel.MATH
    longer = torch.randn(1, 4, 16, 64).half()
    assert choose_kernel(AMPERE, query, longer, longer, None, 0.0, True, False) is Kernel.EFFICIENT


def test_a_mask_that_is_trained_is_not_given_to_cudnn():
    query, mask = torch.randn(1, 4, 16, 64).half(), torch.zeros(1, 4, 16, 16).half()
    given = (find_capability((9, 0)), query, query, query, mask)
    assert choose_kernel(*given, 0.0, False, False) is Kernel.CUDNN
    mask.requires_grad_()
    assert choose_kernel(*given, 0.0, False, False) is Kernel.EFFICIENT
    with torch.no_grad():
        assert choose_kernel(*given, 0.0, False, False) is Kernel.CUDNN


def test_batch_norm_and_dropout():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
    graph = targets(model, torch.randn(2, 3, 8, 8))
    assert {"aten.cudnn_batch_norm.default", "aten.native_dropout.default"} <= names(graph)
    assert [each.dtype for each in graph.storages if each.size_bytes == 2 * 4 * 6 * 6] == ["bool"]


def test_dropout_in_place_keeps_what_a_cpu_keeps():
    graph = targets(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5, inplace=True)), torch.randn(2, 4))
    assert "aten.native_dropout.default" not in names(graph)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_one_operator_with_a_reserve(layer):
    graph = targets(layer(8, 16, num_layers=2, batch_first=True), torch.randn(4, 10, 8))
    assert {"aten._cudnn_rnn.default", "aten._cudnn_rnn_backward.default"} <= names(graph)
    assert any(each.dtype == "uint8" and each.size_bytes > 0 for each in graph.storages)


def test_softmax_in_32_bits_makes_no_copy_of_its_input():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, values):
            return torch.softmax(self.layer(values), -1, dtype=torch.float32).sum()

    model, batch = Model().bfloat16(), torch.randn(4, 8).bfloat16()
    assert "aten._to_copy.default" in names(targets(model, batch, None))
    forward = [each.target for each in targets(model, batch).operations if each.phase == "forward"]
    assert "aten._to_copy.default" not in forward


def test_autocast_casts_by_the_lists_of_cuda():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1))
    here = targets(model, torch.randn(4, 8), None, autocast=torch.bfloat16)
    there = targets(model, torch.randn(4, 8), autocast=torch.bfloat16)
    made = [
        next(each for each in graph.operations if each.target == "aten._softmax.default") for graph in (here, there)
    ]
    dtypes = [graph.storages[each.outputs[0]].dtype for graph, each in zip((here, there), made, strict=True)]
    assert dtypes == ["bfloat16", "float32"]


def test_other_threads_and_later_calls_are_not_touched():
    query = torch.randn(1, 2, 8, 16)
    expected = F.scaled_dot_product_attention(query, query, query)
    seen = []
    with operators_of(AMPERE):
        thread = threading.Thread(target=lambda: seen.append(F.scaled_dot_product_attention(query, query, query)))
        thread.start()
        thread.join()
    assert torch.equal(seen[0], expected)
    assert torch.equal(F.scaled_dot_product_attention(query, query, query), expected)


def test_every_capability_traces_a_step():
    for each in CAPABILITIES:
        assert targets(Attention().half(), torch.randn(2, 16, 64).half(), each).operations


def test_an_unknown_capability_is_refused_by_name():
    with pytest.raises(InvalidInput, match=r"3\.5 is not known"):
        find_capability((3, 5))


def test_an_estimate_for_a_device_is_of_its_operators():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    estimate = memfit.estimate(model, torch.randn(8, 64), device="RTX 3090")
    assert any(storage.dtype == "bool" for storage in estimate.graph.storages)


def test_autocast_leaves_what_only_a_cpu_casts_and_casts_what_that_calls():
    def loss(model, batch):
        with torch.autocast("cpu", torch.float16):
            return F.cross_entropy(torch.cat([model(batch), batch], 1), torch.zeros(4, dtype=torch.int64))

    graph = memfit.estimate(nn.Linear(8, 8), torch.randn(4, 8), loss=loss, device="A100-40GB").graph
    dtypes = {each.target: graph.storages[each.outputs[0]].dtype for each in graph.operations}
    assert dtypes["aten.addmm.default"] == "float16"
    assert dtypes["aten._log_softmax.default"] == "float32"  # the class scores are: `cat` has made them so by itself
    assert [each.target for each in graph.operations].count("aten.cat.default") == 1


def test_cross_entropy_of_16_bits_keeps_them_for_its_softmax():
    def loss(model, batch):
        with torch.autocast("cpu", torch.float16):
            return F.cross_entropy(model(batch), torch.zeros(4, dtype=torch.int64))

    graph = memfit.estimate(nn.Linear(8, 8), torch.randn(4, 8), loss=loss, device="A100-40GB").graph
    softmax = next(each for each in graph.operations if each.target == "aten._log_softmax.default")
    assert graph.storages[softmax.outputs[0]].dtype == "float16"


def test_dropping_nothing_copies_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 8))
    assert "aten.clone.default" not in names(targets(model, torch.randn(4, 8)))
    assert names(targets(model.eval(), torch.randn(4, 8))) == names(targets(model, torch.randn(4, 8), None))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_run_in_16_bits_under_autocast(kind):
    model, batch = kind(16, 16), torch.randn(3, 2, 16)

    def loss(model, batch):
        with torch.autocast("cpu", torch.float16):
            return model(batch)[0].sum()

    graph = memfit.estimate(model, batch, loss=loss, device="A100-40GB", progress=False).graph
    (layer,) = (each for each in graph.operations if each.target == "aten._cudnn_rnn.default")
    assert graph.storages[layer.outputs[0]].dtype == "float16"


def mixed(kind, **options):
    def loss(model, batch):
        with torch.autocast(kind, **options):
            assert torch.is_autocast_enabled("cuda")
            outputs = model(batch)
        return outputs.float().square().mean()

    model = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 64))
    return memfit.estimate(model, torch.randn(32, 64), loss=loss, device="A100-40GB", progress=False)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_autocast_for_cuda_is_that_of_the_device_in_a_trace_without_one(dtype, recwarn):
    named, here = mixed("cuda", dtype=getattr(torch, dtype)), mixed("cpu", dtype=getattr(torch, dtype))
    assert named.graph.operations == here.graph.operations
    assert dtype in {each.dtype for each in named.graph.storages}
    assert not [each for each in recwarn if "autocast" in str(each.message)]


def test_autocast_for_cuda_has_cudas_type_where_none_is_named():
    assert "float16" in {each.dtype for each in mixed("cuda").graph.storages}


def test_autocast_for_cuda_is_as_it_was_after_a_trace():
    mixed("cuda")
    assert torch.is_autocast_enabled() is False
    with pytest.warns(UserWarning, match="autocast"):
        assert torch.autocast("cuda").device == "cuda"


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64, 32))

    def forward(self, rows, ends):
        return torch.nn.functional.grouped_mm(rows, self.weight, offs=ends).square().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_of_groups_are_described_in_every_type(dtype):
    model, rows = Experts().to(dtype), torch.randn(40, 64, dtype=dtype, requires_grad=True)
    ends = torch.tensor([8, 16, 24, 40], dtype=torch.int32)
    estimate = memfit.estimate(model, (rows, ends), device="H100", measure=False, progress=False)
    made = [each for each in estimate.graph.operations if each.target.startswith("aten._grouped_mm")]
    sizes = [estimate.graph.storages[each.outputs[0]].size_bytes for each in made]
    assert sorted(sizes) == sorted([40 * 32 * dtype.itemsize, 40 * 64 * dtype.itemsize, 4 * 64 * 32 * dtype.itemsize])
