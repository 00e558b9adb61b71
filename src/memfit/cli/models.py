"""From the name of a model to the model, without its weights."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memfit import _torch
from memfit.cli import reference as references
from memfit.cli.reference import Reference
from memfit.errors import InvalidModel
from memfit.spelling import spelling_advice

_EXAMPLE = "for example --model torchvision.models.resnet50 or --model ./file.py:make_model"
# What transformers reads from a configuration although no default configuration has it.
_UNDECLARED_FIELDS = {"attn_implementation", "experts_implementation", "loss_type"}


def parse_model(text: str) -> Reference:
    """Read what `--model` names; nothing is imported yet."""
    if not text.strip():
        raise InvalidModel(f"--model is empty; name a class or a function, {_EXAMPLE}")
    return references.parse(text, InvalidModel)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFactory:
    """A callable that makes a model, with its arguments."""

    reference: Reference
    callable: Callable[..., Any]

    def build(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Make the model in training mode. Call it under `memfit.without_weights()`."""
        make = _from_configuration if _is_transformers_model(self.callable) else _called
        with self._explaining(), _without_values(self.reference), default_dtype(dtype):
            model = make(self.reference, self.callable, dtype)
        if not isinstance(model, nn.Module):
            self.reference.fail(
                f"a torch.nn.Module was expected, calling this gave a {type(model).__name__}; name a subclass of "
                f"torch.nn.Module or a function that returns one, {_EXAMPLE}"
            )
        return model.train()

    def _explaining(self) -> contextlib.AbstractContextManager[None]:
        advice = "check its arguments (models are built here without memory for their weights)"
        return self.reference.explaining("building the model", advice)


def find_model(reference: Reference) -> ModelFactory:
    """Import what a reference to a model names."""
    found = references.load(reference)
    if isinstance(found, nn.Module):
        reference.fail(
            f"this is a {type(found).__name__} that is built already, with its weights in memory; name its class, "
            "or a function that builds it"
        )
    return ModelFactory(reference=reference, callable=found)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Make what does not say its own dtype in this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _called(reference: Reference, make: Callable[..., Any], _dtype: torch.dtype | None) -> Any:
    return make(*reference.args, **reference.kwargs)


@contextlib.contextmanager
def _without_values(reference: Reference) -> Iterator[None]:
    try:
        yield
    except (_torch.DataDependentOutputException, _torch.DynamicOutputShapeException) as error:
        reference.fail(
            "the model cannot be built without weights: its constructor asks for the value of a tensor "
            f"({error.func}), which has none here; compute that value with plain Python numbers, or call "
            "memfit.estimate from Python on a model that is in memory"
        )


def _is_transformers_model(found: Callable[..., Any]) -> bool:
    """Asked without importing transformers: a class of its kind exists only where it is imported."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(found, type) and issubclass(found, base)


def _from_configuration(reference: Reference, model_class: Any, dtype: torch.dtype | None) -> Any:
    """A transformers model, from the fields of its configuration."""
    if reference.args:
        reference.fail("give the fields of the configuration by name, such as GPT2LMHeadModel(n_layer=2)")
    if model_class.config_class is None:
        reference.fail(f"{model_class.__name__} has no configuration of its own; name the class of one model")
    _check_fields(reference, model_class.config_class)
    configuration = model_class.config_class(**reference.kwargs)
    if hasattr(configuration, "use_cache") and "use_cache" not in reference.kwargs:
        configuration.use_cache = False  # keys and values for generation are no part of a training step
    return model_class._from_config(configuration, **({} if dtype is None else {"dtype": dtype}))


def _check_fields(reference: Reference, configuration_class: Any) -> None:
    """A configuration takes any name and ignores it, so a slip of the pen would estimate another model."""
    known = configuration_class()
    for name in reference.kwargs:
        if name in _UNDECLARED_FIELDS or hasattr(known, name):
            continue
        advice = spelling_advice(name, dir(known))
        reference.fail(f"{configuration_class.__name__} has no field {name!r}; {advice}")
