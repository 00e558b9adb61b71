"""Training steps that others have measured on real GPUs, and that can be built here without their weights."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.course_lm import AdamW, CourseLM, cross_entropy, softmax
from benchmarks.gpu_truth_language import bert, causal, gpt_neo, outputs_in_a_variable, qwen2, qwen3, t5

Loss = Callable[[Any, Any], torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the records: what ran, and how its loop ran it."""

    row: int  # of measured.csv, from 0; below 0: `peaks` are the record
    name: str
    device: str
    make: Callable[[], tuple[nn.Module, Any]]  # model and batch, made without memory
    loss: Loss
    optimizer: Any = None
    gradients: str = "none"  # before a step: "none" or "kept"
    outputs: str = "none"  # of the step before
    before_mib: float = 0.0  # of a record that the step does not take
    earlier: tuple[int, ...] = ()  # rows of what the same process trained before, whose models stay
    searches: bool = False  # cuDNN tries all algorithms, `torch.backends.cudnn.benchmark`
    peaks: tuple[int, int] = (0, 0)  # allocated and reserved bytes of a trace that measured.csv has no row of
    forward_only: bool = False  # no backward pass
    context_mib: tuple[float, float] = (0.0, 0.0)  # what of a context a figure contains, where it is of a process


def _sum(model: Any, batch: Any) -> torch.Tensor:
    return model(batch).sum()  # type: ignore[no-any-return]


def _sum_of_all(model: Any, batch: Any) -> torch.Tensor:
    outputs = model(batch)
    return (outputs[0] + outputs[1] + outputs[2]).sum()  # type: ignore[no-any-return]


def _classified(model: Any, batch: Any) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _own_loss(model: Any, batch: Any) -> torch.Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def _written_out(model: Any, batch: Any) -> torch.Tensor:
    tokens, targets = batch
    _HELD[:] = [model(tokens)]
    return cross_entropy(_HELD[0], targets)


_HELD: list[torch.Tensor] = []  # what a loop keeps in a variable of its own until the next step


def _plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _vision(name: str, **options: Any) -> nn.Module:
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)(weights=None, **options)
    return model


def _monet(row: int, name: str, batch: int, make: Callable[[], nn.Module], **changes: Any) -> Case:
    size = changes.pop("size", (224, 224))
    options: dict[str, Any] = {"loss": _sum, "gradients": "kept", "searches": True} | changes
    return Case(row=row, name=name, device="P100-16GB", make=lambda: (make(), torch.empty(batch, 3, *size)), **options)


class OldReLU6(nn.Module):
    """ReLU6 in place as in torch 1.5, of which the record is: later ones keep a copy of the input for the gradient."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _OldReLU6.apply(values)
        return result


class _OldReLU6(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        torch.ops.aten.clamp_(values, 0.0, 6.0)
        ctx.mark_dirty(values)
        ctx.save_for_backward(values)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (values,) = ctx.saved_tensors
        result: torch.Tensor = torch.ops.aten.hardtanh_backward(gradients[0], values, 0.0, 6.0)
        return result


def _mobilenet() -> nn.Module:
    model: Any = _vision("mobilenet_v2")
    for holder in [each for each in model.modules() if isinstance(each, nn.Sequential)]:
        for name, part in holder.named_children():
            if isinstance(part, nn.ReLU6):
                setattr(holder, name, OldReLU6())
    pool = nn.AdaptiveAvgPool2d((1, 1))
    return nn.Sequential(model.features, pool, nn.Flatten(start_dim=1), *model.classifier)


# That record's program sets a limit for the allocator, which makes the context, before it notes what the device holds
# already; so of a context its figures contain the kernels alone that are loaded later. How much these take is not
# recorded: its smallest model (838 MiB, of which the simulated allocator reserves 836) leaves them 2 MiB, and 3% of
# what is reserved, as far as simulations are off. And it gives cuBLAS no workspaces.
_LOADED_LATER_MIB = (0.0, 27.0)
_CUBLAS_MIB = 2 * 8.125


def _xmem(row: int, name: str, batch: int, make: Callable[[], nn.Module], optimizer: Any) -> Case:
    return Case(
        row=row,
        name=name,
        device="RTX 3060",
        make=lambda: (make(), (torch.empty(batch, 3, 86, 86), torch.empty(batch, dtype=torch.int64))),
        loss=_classified,
        optimizer=optimizer,
        before_mib=-_CUBLAS_MIB,
        context_mib=_LOADED_LATER_MIB,
    )


def _mnasnet() -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.MNASNet(alpha=1.0, num_classes=10)
    return model


def _small_mobilenet() -> nn.Module:
    """The record's own small setting: strides in other places than torchvision's."""
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    rows = [
        (16, 3, 16, 16, True, "RE", 2),
        (16, 3, 72, 24, False, "RE", 2),
        (24, 3, 88, 24, False, "RE", 1),
        (24, 5, 96, 40, True, "HS", 2),
        (40, 5, 240, 40, True, "HS", 1),
        (40, 5, 240, 40, True, "HS", 1),
        (40, 5, 120, 48, True, "HS", 1),
        (48, 5, 144, 48, True, "HS", 1),
        (48, 5, 288, 96, True, "HS", 2),
        (96, 5, 576, 96, True, "HS", 1),
        (96, 5, 576, 96, True, "HS", 1),
    ]
    settings = [InvertedResidualConfig(*row, dilation=1, width_mult=1.0) for row in rows]
    model: nn.Module = MobileNetV3(settings, last_channel=1024, num_classes=10)
    return model


def _floats(row: int, name: str, make: Callable[[], nn.Module], *earlier: int) -> Case:
    """A step of the notebook whose models are trained one after another and stay, each from an emptied cache."""
    return Case(
        row=row,
        name=name,
        device="RTX 4090",
        make=lambda: (make(), (torch.empty(128, 3, 224, 224), torch.empty(128, 10))),
        loss=_classified,
        optimizer=_plain_sgd,
        earlier=earlier,
    )


def _with_ten_classes(name: str, place: str) -> nn.Module:
    model = _vision(name)
    holder, _, attribute = place.rpartition(".")
    owner: Any = model.get_submodule(holder)
    last = owner[int(attribute)] if attribute.isdigit() else getattr(owner, attribute)
    layer = nn.Linear(last.in_features, 10)
    if attribute.isdigit():
        owner[int(attribute)] = layer
    else:
        setattr(owner, attribute, layer)
    return model


def _unetr() -> tuple[nn.Module, Any]:
    from monai.networks.nets import UNETR

    sizes = {"feature_size": 16, "hidden_size": 768, "mlp_dim": 3072, "num_heads": 12}
    model: nn.Module = UNETR(in_channels=1, out_channels=2, img_size=(64, 64, 64), norm_name="instance", **sizes)
    return model, (torch.empty(8, 1, 64, 64, 64), torch.empty(8, 2, 64, 64, 64))


def _small_cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(98568, 10))


def _language(row: int, name: str, device: str, batch: int, make: Callable[[], nn.Module], optimizer: Any) -> Case:
    def both() -> tuple[nn.Module, Any]:
        tokens = torch.empty(batch, 128, dtype=torch.int64)
        return make(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}

    return Case(
        row=row,
        name=name,
        device=device,
        make=both,
        loss=outputs_in_a_variable,
        outputs="kept",
        optimizer=optimizer,
        before_mib=-_CUBLAS_MIB,
        context_mib=_LOADED_LATER_MIB,
    )


def _course(row: int, name: str, sizes: tuple[int, ...], batch: int, context: int, device: str, **changes: Any) -> Case:
    vocabulary, width, inner, layers, heads = sizes

    def make() -> tuple[nn.Module, Any]:
        tokens = torch.empty(batch, context, dtype=torch.int64)
        return CourseLM(vocabulary, context, width, inner, layers, heads), (tokens, tokens.clone())

    options: dict[str, Any] = {"loss": _written_out, "optimizer": AdamW} | changes
    return Case(row=row, name=name, device=device, make=make, **options)


_SMALL, _MIDDLE = (768, 3072, 12, 12), (1024, 4096, 24, 16)


def _served(
    row: int,
    context: int,
    peaks: tuple[int, int] = (0, 0),
    *,
    sizes: tuple[int, ...] = _MIDDLE,
    mixed: bool = False,
) -> Case:
    """A course LM in inference mode."""

    def make() -> tuple[nn.Module, Any]:
        return CourseLM(10_000, context, *sizes), torch.empty(4, context, dtype=torch.int64)

    def loss(model: Any, batch: Any) -> Any:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            return model(batch)

    name = f"course LM {sizes[2]} x {sizes[0]}, b4 x {context}, inference{' in bf16' if mixed else ''}"
    return Case(row=row, name=name, device="RTX 4090", make=make, loss=loss, peaks=peaks, forward_only=True)


def _linear(row: int, peaks: tuple[int, int], *, gradients: bool) -> Case:
    """One layer, forward alone, whose result is in a variable until the next: with gradients so is its input."""

    def make() -> tuple[nn.Module, Any]:
        rows = [torch.empty(5000, 10_000) for _ in range(2 if gradients else 1)]
        return nn.Linear(10_000, 50_000), rows

    def loss(model: Any, rows: Any) -> Any:
        with torch.set_grad_enabled(gradients):
            return model(rows[0])

    name = f"one layer, forward{'' if gradients else ' without gradients'}"
    options: dict[str, Any] = {"peaks": peaks, "forward_only": True, "outputs": "kept"}
    return Case(row=row, name=name, device="H100-80GB", make=make, loss=loss, **options)


class _Attention(nn.Module):
    """Attention written out, of a head of 16, whose queries, keys and values are what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(torch.empty(8, 4096, 16)) for _ in range(3))

    def forward(self, _batch: Any) -> torch.Tensor:
        scores = torch.einsum("bqd,bkd->bqk", self.query, self.key) / 4.0
        return torch.einsum("bqk,bkd->bqd", softmax(scores), self.value)


def _forward(row: int, context: int, peaks: tuple[int, int], *, mixed: bool = False) -> Case:
    """A forward pass of the biggest course LM whose graph is kept, in 32 bits or with autocast to bfloat16."""

    def make() -> tuple[nn.Module, Any]:
        return CourseLM(10_000, context, 2560, 10_240, 32, 32), torch.empty(4, context, dtype=torch.int64)

    def loss(model: Any, tokens: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            logits = model(tokens)
        return logits.sum(), logits

    name = f"course LM 32 x 2560, b4 x {context}, forward{' in bf16' if mixed else ''}"
    return Case(row=row, name=name, device="H100-80GB", make=make, loss=loss, peaks=peaks, forward_only=True)


_COMPILED = "the record is of a model under torch.compile, which an estimate counts as it runs without"
# What records of whole models of grade A are not compared, and why.
LEFT_OUT = {
    **dict.fromkeys(range(21, 27), _COMPILED),
    38: "what torchtune's packed batches and masks take is not told by the record",
    **dict.fromkeys(range(39, 45), _COMPILED),
}


def cases() -> list[Case]:
    """Return every case, in the order of the records."""
    from benchmarks.monet_unet import UNet

    named = functools.partial
    medium, small = (10_000, 1024, 4096, 24, 16), (50_257, 768, 3072, 12, 12)
    return [
        _monet(0, "ResNet-50 b184", 184, named(_vision, "resnet50")),
        _monet(1, "GoogLeNet b320", 320, named(_vision, "googlenet", init_weights=False), loss=_sum_of_all),
        _monet(2, "UNet b11", 11, UNet, size=(416, 608)),
        _monet(3, "MobileNetV2 b272", 272, _mobilenet),
        _monet(4, "VGG-16 b176", 176, named(_vision, "vgg16")),
        _xmem(5, "ConvNeXt-T b282", 282, named(_vision, "convnext_tiny"), _adam),
        _xmem(6, "MnasNet b323", 323, _mnasnet, _plain_sgd),
        _xmem(7, "ResNet-101 b351", 351, named(_vision, "resnet101"), _plain_sgd),
        _xmem(8, "VGG-16 b684", 684, named(_vision, "vgg16"), _plain_sgd),
        _language(9, "GPT-Neo 125M b10", "RTX 3060", 10, gpt_neo, _adamw),
        _language(10, "Qwen3-4B b1", "A100-40GB", 1, qwen3, _plain_sgd),
        _xmem(11, "RegNetX-400MF b382", 382, named(_vision, "regnet_x_400mf"), _adam),
        _xmem(12, "MobileNetV3-S b258", 258, _small_mobilenet, _plain_sgd),
        _language(13, "DistilGPT-2 b10", "RTX 3060", 10, named(causal, "GPT2", n_layer=6), _adamw),
        _language(14, "T5-small b20", "RTX 3060", 20, t5, _adamw),
        _language(15, "DeepSeek-R1-Qwen-1.5B b1", "A100-40GB", 1, qwen2, _plain_sgd),
        _floats(16, "small CNN b128", _small_cnn),
        _floats(17, "VGG-16 b128", named(_with_ten_classes, "vgg16", "classifier.6"), 16),
        _floats(18, "ResNet-50 b128", named(_with_ten_classes, "resnet50", "fc"), 16, 17),
        _floats(19, "ViT-B/16 b128", named(_with_ten_classes, "vit_b_16", "heads.0"), 16, 17, 18),
        Case(
            row=20,
            name="UNETR b8",
            device="RTX 4090",
            make=_unetr,
            loss=_classified,
            optimizer=_plain_sgd,
            earlier=(16, 17, 18, 19),
        ),
        Case(
            row=91,
            name="BERT-large b4 x 512",
            device="V100-16GB",
            make=bert,
            loss=_own_loss,
            optimizer=_adamw,
            context_mib=(1343e6 / 2**20, 1343e6 / 2**20),
        ),
        Case(
            row=92,
            name="ViT-L/16 b1",
            device="A100-40GB",
            make=lambda: (_vision("vit_l_16"), torch.empty(1, 3, 224, 224)),
            loss=_sum,
            optimizer=_adam,
        ),
        _course(94, "course LM 24 x 1024, b4 x 128", medium, 4, 128, "RTX 4090"),
        _course(95, "course LM 24 x 1024, b4 x 256", medium, 4, 256, "RTX 4090"),
        _course(  # of 64 tokens: the recorded ones take 512 bytes, their embeddings 64 x 768 x 4
            97,
            "course LM 12 x 768, b1 x 64",
            small,
            1,
            64,
            "RTX 4090",
            gradients="kept",
            optimizer=named(AdamW, decays_first=False),
        ),
        _course(98, "course LM 32 x 2560, b4 x 128", (10_000, 2560, 10_240, 32, 32), 4, 128, "H100-80GB"),
        _forward(-1, 128, (19_498_420_224, 19_667_091_456)),
        _forward(-2, 256, (26_388_097_024, 26_545_750_016)),
        _forward(-3, 128, (24_024_505_344, 24_245_174_272), mixed=True),
        _forward(-4, 256, (28_398_369_792, 28_848_422_912), mixed=True),
        _served(96, 128),
        _served(-5, 256, (1_795_741_696, 1_864_368_128)),
        _served(-11, 128, (560_939_008, 610_271_232), sizes=_SMALL),
        _served(-6, 512, (1_951_309_824, 1_981_808_640), mixed=True),
        _course(
            -7,
            "course LM 32 x 2560, b4 x 256",
            (10_000, 2560, 10_240, 32, 32),
            4,
            256,
            "H100-80GB",
            peaks=(54_961_465_856, 61_111_009_280),
        ),
        _linear(-8, (4_436_169_216, 4_439_670_784), gradients=True),
        _linear(-9, (4_236_169_216, 4_439_670_784), gradients=False),
        Case(
            row=-10,
            name="attention written out, b8 x 4096",
            device="RTX 4090",
            make=lambda: (_Attention(), torch.empty(0)),
            loss=_sum,
            peaks=(3_249_144_832, 3_781_165_056),
        ),
    ]
