import sys
import types
from typing import Any, ClassVar

import pytest
import torch
from command_line import folder_with_net
from torch import nn

import memfit
from memfit import _torch
from memfit.cli.models import find_model, parse_model
from memfit.errors import InvalidModel


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    return folder_with_net(tmp_path, monkeypatch)


def built(text, dtype=None):
    factory = find_model(parse_model(text))
    with memfit.without_weights():
        return factory.build(dtype)


@pytest.mark.parametrize(
    ("text", "width", "depth"),
    [
        ("./net.py:make_model", 8, 1),
        ("./net.py:make_model()", 8, 1),
        ("./net.py:make_model(16, depth=2)", 16, 2),
        ("./net.py:Net(depth=3, width=4)", 4, 3),
        ("./net.py:half(depth=2)", 4, 2),
    ],
)
def test_classes_and_factories_are_called_with_their_literals(text, width, depth):
    model = built(text)
    assert len(model.layers) == depth
    assert model.layers[0].in_features == width


def test_a_model_has_no_memory_and_is_in_training_mode():
    model = built("torch.nn.Linear(1_000_000, 1_000_000)")  # 4 TB
    assert isinstance(model.weight, _torch.FakeTensor)
    assert model.training


def test_a_dotted_name_of_an_installed_package():
    pytest.importorskip("torchvision")
    assert built("torchvision.models.resnet18(num_classes=10)").fc.out_features == 10


def test_the_dtype_is_that_of_the_parameters_and_of_nothing_after():
    assert built("./net.py:make_model", torch.bfloat16).layers[0].weight.dtype is torch.bfloat16
    with pytest.raises(InvalidModel):
        built("./net.py:fails", torch.bfloat16)
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "--model is empty"),
        ("./net.py:makes_a_number", "a torch.nn.Module was expected, calling this gave a int"),
        ("./net.py:make_batch", "calling this gave a dict"),
        ("./net.py:built", "a Net that is built already"),
        ("./net.py:fails", "ValueError: a reason in two lines"),
        ("./net.py:exits", "SystemExit: enough"),
        ("./net.py:Net(wdith=3)", "unexpected keyword argument 'wdith'"),
        ("./net.py:LooksAtValues()", "cannot be built without weights"),
    ],
)
def test_what_is_no_model_is_refused(text, complaint):
    with pytest.raises(InvalidModel) as refused:
        built(text)
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_line_that_failed_is_named():
    with pytest.raises(InvalidModel, match=r"/net\.py:\d+ with ValueError"):
        built("./net.py:fails")


class StandInConfiguration:
    """What memfit uses of a transformers configuration."""

    def __init__(self, **fields: Any) -> None:
        self.width, self.use_cache = 4, True
        self.__dict__.update(fields)


class StandInModel(nn.Module):
    config_class: ClassVar[Any] = StandInConfiguration

    def __init__(self, configuration: Any) -> None:
        super().__init__()
        self.configuration = configuration
        self.layer = nn.Linear(configuration.width, configuration.width)

    @classmethod
    def _from_config(cls, configuration: Any, **options: Any) -> "StandInModel":
        model = cls(configuration)
        model.options = options
        return model


class WithoutConfiguration(StandInModel):
    config_class = None


@pytest.fixture
def transformers_like(monkeypatch):
    modeling = types.ModuleType("transformers.modeling_utils")
    modeling.PreTrainedModel = StandInModel
    package = types.ModuleType("stand_in_models")
    package.Model, package.WithoutConfiguration = StandInModel, WithoutConfiguration
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", modeling)
    monkeypatch.setitem(sys.modules, "stand_in_models", package)


@pytest.mark.usefixtures("transformers_like")
class TestTransformersModels:
    def test_keywords_are_fields_of_the_configuration(self):
        model = built("stand_in_models:Model(width=6)", torch.float16)
        assert model.layer.in_features == 6
        assert model.options == {"dtype": torch.float16}

    def test_no_dtype_is_given_when_none_was_asked_for(self):
        assert built("stand_in_models:Model").options == {}

    def test_the_cache_is_off_unless_it_was_asked_for(self):
        assert built("stand_in_models:Model").configuration.use_cache is False
        assert built("stand_in_models:Model(use_cache=True)").configuration.use_cache is True

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("stand_in_models:Model(widht=6)", "has no field 'widht'; did you mean width?"),
            ("stand_in_models:Model(6)", "by name"),
            ("stand_in_models:WithoutConfiguration", "has no configuration of its own"),
            ("stand_in_models:Model(width='six')", "building the model failed"),
        ],
    )
    def test_wrong_fields_are_refused(self, text, complaint):
        with pytest.raises(InvalidModel) as refused:
            built(text)
        assert complaint in str(refused.value)


def test_a_real_model_of_transformers():
    pytest.importorskip("transformers")
    model = built("transformers:GPT2LMHeadModel(n_layer=1, n_embd=8, n_head=2, vocab_size=16)", torch.bfloat16)
    assert len(model.transformer.h) == 1
    assert model.config.use_cache is False
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with pytest.raises(InvalidModel, match="has no field 'n_layers'; did you mean n_layer"):
        built("transformers:GPT2LMHeadModel(n_layers=1)")


def test_a_class_that_only_looks_like_one_of_transformers_is_called_as_it_is(folder):
    (folder / "own.py").write_text(
        "from torch import nn\n"
        "class Own(nn.Linear):\n"
        "    config_class = dict\n"
        "    def __init__(self, width=3):\n"
        "        super().__init__(width, width)\n"
    )
    assert built("./own.py:Own(width=5)").in_features == 5
