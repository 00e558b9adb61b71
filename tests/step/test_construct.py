"""Models are built where they live and filled from files without a second copy."""

import pytest
import safetensors.torch
import torch
from torch import nn
from training import TiedNet, assert_same_parameters

import memfit
from memfit.errors import InvalidFile, InvalidInput
from memfit.measure.peak import held_bytes, measure_peak

pytestmark = pytest.mark.usefixtures("one_thread")

MIB = 2**20


def wide():
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))


def test_models_are_built_in_their_precision():
    with memfit.init(dtype=torch.bfloat16, device="cpu"):
        model = TiedNet()
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() is torch.float32
    with memfit.init(device="meta"):
        assert nn.Linear(2, 2).weight.is_meta
    with pytest.raises(InvalidInput, match="floating-point"), memfit.init(dtype=torch.int64):
        pass


def test_building_in_bf16_never_holds_fp32():
    def build():
        with memfit.init(dtype=torch.bfloat16):
            return wide()

    assert measure_peak(build, resident=[]).peak_bytes <= 1.2 * held_bytes([build()])


def test_the_same_model_as_built_and_cast():
    torch.manual_seed(0)
    with memfit.init(dtype=torch.float64):
        built = TiedNet()
    assert all(parameter.dtype is torch.float64 for parameter in built.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_never_holds_two_copies(tmp_path, dtype):
    saved = wide()
    safetensors.torch.save_file(saved.state_dict(), tmp_path / "model.safetensors")
    made = []

    def build():
        with memfit.init(dtype=dtype, weights=False):
            model = wide()
        assert all(parameter.is_meta for parameter in model.parameters())
        made.append(memfit.load(model, tmp_path / "model.safetensors"))

    peak_bytes = measure_peak(build, resident=[]).peak_bytes
    assert peak_bytes <= 1.05 * held_bytes(made)
    assert_same_parameters(made[0], saved.to(dtype))


def test_tied_weights_stay_tied_and_buffers_stay_real(tmp_path):
    class WithBuffers(TiedNet):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.arange(3.0))
            self.register_buffer("derived", torch.arange(4.0), persistent=False)

    saved = WithBuffers()
    saved.kept += 1
    tensors = saved.state_dict()
    del tensors["again.weight"]  # as libraries that save tied weights once do
    safetensors.torch.save_file(tensors, tmp_path / "file")
    with memfit.init(weights=False):
        model = WithBuffers()
    memfit.load(model, tmp_path / "file")
    assert model.again.weight is model.inner.weight
    assert torch.equal(model.derived, torch.arange(4.0))
    assert_same_parameters(model, saved)
    memfit.load(saved, [tmp_path / "file"])  # into what is there already
    assert_same_parameters(model, saved)


def test_files_of_other_models_change_nothing(tmp_path):
    model = nn.Linear(3, 2)
    before = model.weight.clone()
    safetensors.torch.save_file({"weight": torch.ones(2, 3)}, tmp_path / "lacking")
    safetensors.torch.save_file({"weight": torch.ones(2, 4), "bias": torch.ones(2)}, tmp_path / "other")
    safetensors.torch.save_file(
        {"weight": torch.ones(2, 3), "bias": torch.ones(2), "more": torch.ones(1)}, tmp_path / "more"
    )
    with pytest.raises(InvalidFile, match="lack 'bias'"):
        memfit.load(model, tmp_path / "lacking")
    with pytest.raises(InvalidFile, match=r"shape \(2, 4\)"):
        memfit.load(model, tmp_path / "other")
    with pytest.raises(InvalidFile, match="hold 'more'"):
        memfit.load(model, tmp_path / "more")
    assert torch.equal(model.weight, before)
    with memfit.init(device="meta"):
        bare = nn.BatchNorm1d(2)
    safetensors.torch.save_file(nn.BatchNorm1d(2).state_dict(), tmp_path / "norm")
    with pytest.raises(InvalidInput, match="weights=False"):
        memfit.load(bare, tmp_path / "norm")


def test_what_is_saved_is_loaded_also_by_others(tmp_path):
    saved = TiedNet()
    memfit.save(saved, tmp_path / "file")
    assert len(safetensors.torch.load_file(tmp_path / "file")) == len(list(saved.parameters()))
    with memfit.init(weights=False):
        model = TiedNet()
    assert_same_parameters(memfit.load(model, tmp_path / "file"), saved)
