"""One call of a model: the positional and keyword arguments of its forward."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memfit.capture.held import own_kind
from memfit.capture.outputs import children_of, key_name
from memfit.errors import CaptureError, InvalidModel, InvalidSample
from memfit.tensors import tensors_in
from memfit.trees import is_record, leaves_of, paths_of


@dataclasses.dataclass(frozen=True)
class Sample:
    """The arguments of one call of `model.forward`."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, sample: Any) -> "Sample":
        """Read a sample as users write it: a tensor, a tuple, a dict, or a `Sample`."""
        if isinstance(sample, Sample):
            return sample
        if isinstance(sample, tuple | list):
            return without_graph(cls(tuple(sample)))
        if isinstance(sample, Mapping):
            return without_graph(cls((), dict(sample)))
        return without_graph(cls((sample,)))

    def leaf_names(self) -> list[str]:
        """What to call each leaf: `input_ids`, `x.0`; positional arguments by their place."""
        return [".".join(map(key_name, path[1:])) for path in paths_of((self.args, dict(self.kwargs)))]

    def leaves(self) -> list[Any]:
        return leaves_of((self.args, dict(self.kwargs)))

    def tensors(self) -> list[torch.Tensor]:
        return tensors_in((self.args, dict(self.kwargs)))


def cut_off(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sample:
    """Return the arguments of a call in the middle of a program, without the graph that led to them."""
    cut: dict[int, torch.Tensor] = {}  # what is given twice stays one

    def alone(tensor: torch.Tensor) -> torch.Tensor:
        return cut.setdefault(id(tensor), tensor.detach().requires_grad_(tensor.requires_grad))

    return with_others(args, kwargs, alone)


def with_others(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], other: Callable[[torch.Tensor], torch.Tensor] = lambda each: each
) -> Sample:
    """Return the same arguments in other lists and dictionaries, and maybe other tensors."""
    ordered = dict(kwargs)
    leaves = leaves_of((args, ordered))
    given = iter([other(each) if isinstance(each, torch.Tensor) else each for each in leaves])
    made: dict[int, Any] = {}
    return Sample(
        tuple([with_leaves(each, given, made) for each in args]),
        {name: with_leaves(each, given, made) for name, each in ordered.items()},
    )


def with_leaves(value: Any, leaves: Iterator[Any], made: dict[int, Any]) -> Any:
    """Return a container like another one with other leaves; `made` has those that are there twice."""
    if not is_container(value):
        return next(leaves)
    children, spec = children_of(value)
    own = pytree.tree_unflatten([with_leaves(each, leaves, made) for each in children], spec)
    return made.setdefault(id(value), torch.Size(own) if isinstance(value, torch.Size) else own)


def is_container(value: Any) -> bool:
    """Return whether a value is taken apart."""
    return type(value) in pytree.SUPPORTED_NODES or pytree.is_namedtuple_instance(value) or is_record(value)


def without_graph(sample: Sample) -> Sample:
    """Return a sample whose gradients end there; the same where they do so anyway."""
    if all(each.grad_fn is None for each in sample.tensors()):
        return sample
    return cut_off(sample.args, sample.kwargs)


def check_sample(model: nn.Module, sample: Sample, *, trains: bool = True) -> None:
    """Refuse what cannot work before anything is traced, in words about the model and the sample."""
    check_initialized(model)
    if trains and not any(each.requires_grad for each in (*model.parameters(), *sample.tensors())):
        raise InvalidModel(
            f"{type(model).__name__} has no parameter that requires a gradient, so there is no "
            "training step to look at; call requires_grad_(True) on what should be trained"
        )
    iterator = next((each for each in sample.leaves() if _is_iterator(each)), None)
    if iterator is not None:
        raise InvalidSample(
            f"the sample holds an iterator ({type(iterator).__name__}), which is used up by one call; give a list or a "
            "tuple of what it yields"
        )
    _check_kinds(model, sample)
    _check_signature(model, sample)
    _check_devices(model, sample)


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__")


def check_initialized(model: nn.Module) -> None:
    """Refuse a model that has lazy layers it has not run yet."""
    if any(isinstance(each, nn.parameter.UninitializedParameter) for each in model.parameters()):
        raise InvalidModel(
            f"{type(model).__name__} has parameters without a shape (lazy layers); run it once on a batch before"
        )


def check_dense(model: nn.Module, sample: Sample) -> None:
    """Refuse sparse arguments, parameters and buffers, of whose memory nothing is known."""
    for name, each in _named_leaves(model, sample):
        if isinstance(each, torch.Tensor) and (kind := own_kind([each])).startswith("is sparse"):
            raise _not_plain(model, name, kind)


def _check_kinds(model: nn.Module, sample: Sample) -> None:
    """Refuse tensors that are not dense ones of torch's."""
    for name, each in _named_leaves(model, sample):
        if kind := own_kind([each]):
            raise _not_plain(model, name, kind)


def _named_leaves(model: nn.Module, sample: Sample) -> list[tuple[str, Any]]:
    return [*zip(sample.leaf_names(), sample.leaves(), strict=True), *model.named_parameters(), *model.named_buffers()]


def _not_plain(model: nn.Module, name: str, kind: str) -> CaptureError:
    return CaptureError(
        f"{type(model).__name__} could not be captured: {name!r} {kind}, of which nothing is planned; give or hold a "
        "plain tensor (to_dense(), as_subclass(torch.Tensor)), or fit the parts that take plain ones"
    )


def _check_signature(model: nn.Module, sample: Sample) -> None:
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*sample.args, **sample.kwargs)
    except TypeError as error:
        raise InvalidSample(
            f"the sample does not fit {type(model).__name__}.forward{signature}: {error}; "
            "give positional arguments as a tuple and keyword arguments as a dict"
        ) from None


def _check_devices(model: nn.Module, sample: Sample) -> None:
    model_devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    sample_devices = {str(tensor.device) for tensor in sample.tensors()}
    if model_devices and sample_devices and not sample_devices <= model_devices:
        raise InvalidSample(
            f"the sample is on {', '.join(sorted(sample_devices))} and the model on "
            f"{', '.join(sorted(model_devices))}; move one to the other with .to(device)"
        )
    if "meta" in model_devices | sample_devices:
        raise InvalidModel(
            "the model is on the meta device, on which a training step cannot be traced; "
            "build it under `with memfit.without_weights():` instead"
        )
