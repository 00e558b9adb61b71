"""What a model and a call are and where they live, in words, hashes and facts."""

import hashlib

import torch
from torch import nn

from memfit import _torch
from memfit.accelerator import GRANULARITY_BYTES, is_accelerator
from memfit.capture.cuda.capability import Capability, find_capability
from memfit.capture.sample import Sample
from memfit.measure.devices import Device
from memfit.tensors import states_by_name


def device_of(model: nn.Module) -> str:
    """Where the model is; one without tensors is on the CPU."""
    tensors = [*model.parameters(), *model.buffers()]
    return str(tensors[0].device) if tensors else "cpu"


def is_for_cuda(model: nn.Module, target: Device | None) -> bool:
    """Whether the step would run on a CUDA device."""
    return torch.device(device_of(model)).type == "cuda" if target is None else target.is_cuda


def is_for_accelerator(model: nn.Module, target: Device | None) -> bool:
    """Whether the step would run on a device with a memory of its own."""
    return is_accelerator(device_of(model)) if target is None else target.is_cuda


def capability_elsewhere(model: nn.Module, target: Device | None) -> Capability | None:
    """What a CUDA device runs that the model is not on; None: the model is traced as it runs where it is."""
    if target is None or target.capability is None or is_for_cuda(model, None):
        return None
    return find_capability(target.capability)


def granularity_bytes(model: nn.Module, target: Device | None) -> int:
    """What the allocator rounds every storage up to."""
    return GRANULARITY_BYTES if is_for_accelerator(model, target) else 1


def is_fake(model: nn.Module, sample: Sample) -> bool:
    """Whether model or sample has no memory."""
    # Not by `detect_fake_mode`: it also finds the mode that is on while a call is traced.
    return any(
        isinstance(each, _torch.FakeTensor) for each in (*model.parameters(), *model.buffers(), *sample.tensors())
    )


def model_digest(model: nn.Module) -> str:
    """A short hash of what a model is made of."""
    described = "\n".join([type(model).__name__, *describe_states(model)])
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def describe_states(model: nn.Module) -> list[str]:
    """Names, dtypes and shapes of all parameters and buffers, and which are trained."""
    states = states_by_name(model).items()
    return [f"{name}: {_described(state)}{' trained' if state.requires_grad else ''}" for name, state in states]


def describe_sample(sample: Sample) -> str:
    """The arguments of a call, in words."""
    leaves = [each for each in sample.leaves() if isinstance(each, torch.Tensor)]
    names = sample.leaf_names()
    tensors = [name for name, leaf in zip(names, sample.leaves(), strict=True) if isinstance(leaf, torch.Tensor)]
    named = zip(tensors, leaves, strict=True)
    return ", ".join(_described(leaf) if name.isdigit() else f"{name}: {_described(leaf)}" for name, leaf in named)


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
