"""A module and a sample in, one ATen graph of forward and backward out."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from memfit import _torch
from memfit.capture.diagnose import explain
from memfit.capture.outputs import OutputTemplate, differentiated, take_apart
from memfit.capture.record import ModuleStack, Recorder
from memfit.capture.sample import Sample, check_sample
from memfit.errors import InvalidModel, MemfitError

ROOT = "model"  # the name under which _Subject holds the captured module


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joint:
    """A traced forward and backward pass. Can be turned into a callable inside `traced` only."""

    export: _torch.JointWithDescriptors
    template: OutputTemplate
    differentiated: tuple[int, ...]  # outputs the backward pass starts from
    undifferentiated: tuple[int, ...]  # outputs that require a gradient but are not among them

    @property
    def state_paths(self) -> list[str]:
        """Parameters, then buffers, in the order the compiled call takes them."""
        paths = (*self.export.params_spec, *self.export.buffers_spec)
        return [path.removeprefix(ROOT + ".") for path in paths]

    @property
    def graph_module(self) -> fx.GraphModule:
        graph_module: fx.GraphModule = self.export.graph_module
        return graph_module


@contextlib.contextmanager
def traced(model: nn.Module, sample: Sample, *, backward_from: str = "auto") -> Iterator[Joint]:
    """Trace one forward and backward pass of `model` on `sample`; nothing is computed."""
    check_sample(model, sample)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_unchanged(model))
        yield _export(stack, model, _as_fake_as(model, sample), backward_from)


def _export(stack: contextlib.ExitStack, model: nn.Module, sample: Sample, backward_from: str) -> Joint:
    subject = _Subject(model, backward_from)
    try:
        return _export_once(stack, subject, sample)
    except _torch.DataDependentOutputException:
        # Libraries that look at values often have a way around it for traces. It may compute
        # more than the eager run does, so it is only taken when the eager way is closed.
        with _torch.tracing_flags():
            return _export_once(stack, subject, sample, last_try=True)


def _export_once(stack: contextlib.ExitStack, subject: "_Subject", sample: Sample, *, last_try: bool = False) -> Joint:
    attempt = contextlib.ExitStack()
    try:
        with torch.enable_grad():
            export = _torch.export_joint(attempt, subject, sample.args, dict(sample.kwargs))
    except MemfitError:
        attempt.close()
        raise
    except Exception as error:
        attempt.close()
        if isinstance(error, _torch.DataDependentOutputException) and not last_try:
            raise
        name = type(subject.model).__name__
        raise explain(error, model_name=name, module=subject.module_stack.innermost) from error
    stack.push(attempt.pop_all().__exit__)
    assert subject.template is not None
    return Joint(
        export=export,
        template=subject.template,
        differentiated=subject.differentiated,
        undifferentiated=subject.undifferentiated,
    )


class _Subject(nn.Module):
    """The module as it is traced: flat outputs, recorded calls, one backward start."""

    def __init__(self, model: nn.Module, backward_from: str) -> None:
        super().__init__()
        self.model = model
        self.module_stack = ModuleStack(model)
        self._backward_from = backward_from
        self.template: OutputTemplate | None = None
        self.differentiated: tuple[int, ...] = ()
        self.undifferentiated: tuple[int, ...] = ()
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        modules = self.module_stack
        with modules.following(), _torch.eager_dispatch(), Recorder(modules):
            output = self.model(*args, **kwargs)
        tensors, self.template = take_apart(output)
        self.differentiated = differentiated(tensors, self._backward_from)
        if not self.differentiated:
            raise InvalidModel(
                f"no output of {type(self.model).__name__} requires a gradient, so there is nothing to "
                "differentiate; check for detach(), no_grad() or frozen parameters on the way to the output"
            )
        self.undifferentiated = tuple(
            index for index, tensor in enumerate(tensors) if tensor.requires_grad and index not in self.differentiated
        )
        return tuple(
            tensor if index in self.differentiated else tensor.detach() for index, tensor in enumerate(tensors)
        )


def _as_fake_as(model: nn.Module, sample: Sample) -> Sample:
    """If the model has no weights in memory, the sample need not be there either."""
    mode = _torch.detect_fake_mode(list(model.parameters()))
    if mode is None:
        return sample
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda tensor: _fake(mode, tensor), (sample.args, dict(sample.kwargs))
    )
    return Sample(args, kwargs)


def _fake(mode: _torch.FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, _torch.FakeTensor) else mode.from_tensor(tensor)


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Undo what a forward leaves on its modules (counters, cached masks made of fakes)."""
    before = [(module, dict(module.__dict__), _registries(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, registries in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for registry, content in zip(_REGISTRIES, registries, strict=True):
                module.__dict__[registry].clear()
                module.__dict__[registry].update(content)


_REGISTRIES = ("_parameters", "_buffers", "_modules")


def _registries(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return tuple(dict(module.__dict__[registry]) for registry in _REGISTRIES)
