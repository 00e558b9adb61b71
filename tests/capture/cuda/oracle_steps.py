"""Bytes of training steps traced on tensors without memory: on a CPU's as a CUDA device runs them, or on CUDA's own.

    python oracle_steps.py fake_cuda.so fp16 GPT-2 BERT    # on CUDA's own, which takes the library; one line of JSON

The library has to be there before torch asks for a device, so it is loaded first, in a process of its own.
"""

import ctypes
import json
import sys
import warnings
from pathlib import Path

if __name__ == "__main__":  # before torch is imported
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import memfit
from benchmarks.family_models import families
from benchmarks.models import frontier_cases
from memfit.cli.torchvision_repair import prepare

DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
STANDARD = ("ResNet-50", "GoogLeNet", "MobileNetV2", "VGG-16", "ViT-B/16", "UNet", "GPT-2", "BERT")  # LSTM: cuDNN's
# Not Swin: torch describes a gradient of its layer norms in the layout of their input, and kernels make it contiguous.
FAMILIES = ("Llama", "Mixtral", "Mamba", "T5", "ViT", "ConvNeXt", "SegFormer", "CLIP", "RegNetY", "EfficientNet-B0")
DEVICE = "A100-40GB"
_KERNELS = torch.library.Library("aten", "IMPL")


def step_bytes(name, precision, device):
    """Return the bytes of every operation's results, in order, and the peak.

    Attention is written out: there are no kernels of CUDA to ask.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with memfit.without_weights():
            model, batch, loss = _made(name)
            model, batch = (
                _moved(model, device),
                pytree.tree_map_only(torch.Tensor, lambda each: each.to(device), batch),
            )

        def cast(module, given):
            with torch.autocast(device, DTYPES[precision], enabled=DTYPES[precision] is not None):
                return loss(module, given)

        with sdpa_kernel(SDPBackend.MATH):
            estimate = memfit.estimate(model, batch, loss=cast, optimizer="adamw", device=DEVICE, progress=False)
    graph = estimate.graph
    made = [[each.target, sum(graph.storages[at].size_bytes for at in each.outputs)] for each in graph.operations]
    made = [each for each in made if each != ["aten.empty.memory_format", 0]]  # kept for cuDNN, of nothing
    return {"peak_bytes": estimate.peak_bytes, "allocated_bytes": estimate.reserved.allocated_bytes, "made": made}


def _moved(model, device):
    """Move a model without weights, of which torch cannot swap the tensors."""
    moved = {}  # a parameter may have two names
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter not in moved:
                moved[parameter] = torch.nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
            part._parameters[name] = moved.get(parameter)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    return model


def _made(name):
    for case in frontier_cases():
        if case.name == name:
            return case.make_model().train(), case.make_batch(case.batch_size), case.loss
    family = next(each for each in families() if each.name == name)
    model, sample = family.make()
    return model, sample, _sum_of_floats


def _sum_of_floats(model, sample):
    given = sample if isinstance(sample, (dict, tuple)) else (sample,)
    outputs = model(**given) if isinstance(given, dict) else model(*given)
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    leaves = pytree.tree_leaves(dict(outputs) if hasattr(outputs, "keys") else outputs)
    return sum(each.float().sum() for each in leaves if isinstance(each, torch.Tensor) and each.is_floating_point())


def believe_in_cuda():
    """Let autocast believe that there is a device, which it asks Python for, and keep what CUDA has kernels of whole.

    A CPU wheel has none of these kernels, and would take such operators apart.
    """
    for name in ("silu_backward", "mish_backward"):
        _KERNELS.impl(name, lambda *_args: None, "CUDA")
    torch.amp.autocast_mode.is_autocast_available = lambda _device: True
    torch.cuda.is_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_args, **_kwargs: True
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False


if __name__ == "__main__":
    prepare()
    torch.set_num_threads(1)
    believe_in_cuda()
    print(json.dumps({name: step_bytes(name, sys.argv[2], "cuda") for name in sys.argv[3:]}))
