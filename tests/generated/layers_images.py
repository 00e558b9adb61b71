"""Convolutions, pools and other layers that take channels first."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from generated.layer import CHANNELS_FIRST, Layer, Stream, divisor, full_precision, layer


@layer("convolution")
class Convolution(Layer):
    takes = CHANNELS_FIRST

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {
            "width": rng.choice((4, 8, 12)),
            "kernel": rng.choice((1, 2, 3, 3)),
            "stride": rng.choice((1, 1, 1, 2)),
            "dilation": rng.choice((1, 1, 2)),
            "groups": rng.choice((1, 1, 2, 64)),
            "bias": rng.random() < 0.6,
            "mode": rng.choice(("zeros", "zeros", "zeros", "reflect", "replicate", "circular")),
        }

    def __init__(
        self, stream: Stream, width: int, kernel: int, stride: int, dilation: int, groups: int, bias: bool, mode: str
    ) -> None:
        super().__init__(stream)
        channels = stream.channels
        groups = divisor(channels, groups)
        width = max(1, width // groups) * groups
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[stream.spatial - 1]
        padding = min(dilation * (kernel - 1) // 2, stream.size - 1)
        if dilation * (kernel - 1) >= stream.size + 2 * padding:
            kernel, padding = 1, 0
        mode = "zeros" if padding == 0 or (mode == "reflect" and stream.spatial == 3) else mode
        self.inner = kind(
            channels,
            width,
            kernel,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=bias,
            padding_mode=mode,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@layer("transposed convolution")
class TransposedConvolution(Layer):
    takes = CHANNELS_FIRST

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {
            "width": rng.choice((4, 8)),
            "kernel": rng.choice((1, 2, 3)),
            "stride": rng.choice((1, 2)),
            "groups": rng.choice((1, 1, 2)),
            "bias": rng.random() < 0.6,
            "dilation": rng.choice((1, 1, 2)),
            "wider": rng.random() < 0.3,
        }

    def __init__(
        self,
        stream: Stream,
        width: int,
        kernel: int,
        stride: int,
        groups: int,
        bias: bool,
        dilation: int = 1,
        wider: bool = False,
    ) -> None:
        super().__init__(stream)
        groups = divisor(stream.channels, groups)
        stride = stride if stream.size <= 8 else 1
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[stream.spatial - 1]
        self.inner = kind(
            stream.channels,
            width,
            kernel,
            stride=stride,
            padding=kernel // 2 if stream.size > 2 else 0,
            output_padding=int(wider and max(stride, dilation) > 1),
            groups=groups,
            bias=bias,
            dilation=dilation,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@layer("depthwise separable")
class DepthwiseSeparable(Layer):
    takes = CHANNELS_FIRST

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        channels, kind = stream.channels, (nn.Conv1d, nn.Conv2d, nn.Conv3d)[stream.spatial - 1]
        self.deep = kind(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.point = kind(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.point(F.silu(self.deep(x), inplace=True))


@layer("pool")
class Pool(Layer):
    takes = CHANNELS_FIRST

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        kinds = ("max", "max", "average", "lp", "adaptive average", "adaptive max", "fractional", "unpooled")
        kinds = (*kinds, "dilated", "uncounted", "divided", "lp 1", "to one", "indices", "softmax 2d", "mixed")
        return {"kind": rng.choice(kinds), "stride": rng.choice((1, 2)), "ceil": rng.random() < 0.3}

    def __init__(self, stream: Stream, kind: str, stride: int, ceil: bool) -> None:
        super().__init__(stream)
        spatial = stream.spatial - 1
        if stream.size < 4:
            kind = "adaptive average"
        if (kind == "fractional" and spatial == 0) or (kind == "unpooled" and any(s % 2 for s in stream.shape[2:])):
            kind = "max"
        self.kind, self.unpooling = kind, None
        self.inner: nn.Module
        if kind == "max":
            self.inner = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[spatial](3, stride, padding=1, ceil_mode=ceil)
        elif kind == "average":
            self.inner = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[spatial](2, stride, ceil_mode=ceil)
        elif kind == "lp":
            self.inner = (nn.LPPool1d, nn.LPPool2d, nn.LPPool3d)[spatial](2, 2, stride, ceil_mode=ceil)
        elif kind == "dilated":
            self.inner = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[spatial](2, stride, dilation=2, ceil_mode=ceil)
        elif kind == "uncounted":
            averages = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
            self.inner = averages[spatial](3, stride, 1, ceil, count_include_pad=False)
        elif kind == "divided":
            averages = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
            self.inner = averages[spatial](2, stride, **({"divisor_override": 3} if spatial else {}))
        elif kind == "lp 1":
            self.inner = (nn.LPPool1d, nn.LPPool2d, nn.LPPool3d)[spatial](1, 2, stride)
        elif kind == "to one":
            self.inner = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[spatial](1)
        elif kind == "indices":
            self.inner = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)[spatial](2, True)
        elif kind == "softmax 2d":
            self.inner = nn.Softmax2d() if spatial == 1 else nn.Softmax(1)
        elif kind == "mixed":
            adaptive = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
            self.inner = adaptive[spatial]((None, 3, 2)[: spatial + 1] if spatial else 3)
        elif kind == "adaptive average":
            pools = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
            self.inner = pools[spatial](max(1, stream.size // 2))
        elif kind == "adaptive max":
            self.inner = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)[spatial](3)
        elif kind == "fractional":
            self.inner = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)[spatial - 1](2, output_ratio=0.6)
        else:
            self.inner = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[spatial](2, return_indices=True)
            self.unpooling = (nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d)[spatial](2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "indices":
            pooled, places = self.inner(x)
            return pooled + (places % 3).to(x.dtype)
        if self.kind.startswith("lp"):
            return self.inner(x.square() + 1)  # roots have no gradient at 0
        if self.unpooling is not None:
            pooled, places = self.inner(x)
            return self.unpooling(pooled, places)
        return self.inner(x)


@layer("resize")
class Resize(Layer):
    takes = CHANNELS_FIRST

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        modes = ("nearest", "linear", "cubic", "area", "nearest-exact", "smooth linear", "smooth cubic")
        how = rng.choice(("factor", "factor", "size", "corners", "module", "odd"))
        return {"mode": rng.choice(modes), "up": rng.random() < 0.5, "how": how}

    def __init__(self, stream: Stream, mode: str, up: bool, how: str = "factor") -> None:
        super().__init__(stream)
        linear = ("linear", "bilinear", "trilinear")[stream.spatial - 1]
        cubic = "bicubic" if stream.spatial == 2 else linear
        self.smooth = mode.startswith("smooth") and stream.spatial == 2
        self.how, mode = how, mode.removeprefix("smooth ")
        self.mode = {"linear": linear, "cubic": cubic}.get(mode, mode)
        self.sizes = [max(1, length + (1 if up else -1)) for length in stream.shape[2:]]
        self.factor = 2.0 if up and stream.size <= 8 else 0.5 if stream.size >= 2 else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        interpolates = "linear" in self.mode or "cubic" in self.mode
        corners = self.how == "corners" if interpolates else None
        if self.how == "size":
            return F.interpolate(x, self.sizes, mode=self.mode, align_corners=corners, antialias=self.smooth)
        if self.how == "module":
            return nn.Upsample(self.sizes, mode=self.mode if self.mode != "area" else "nearest")(x)
        if self.how == "odd":
            return F.interpolate(x, scale_factor=1.3, mode=self.mode, recompute_scale_factor=True)
        return F.interpolate(x, scale_factor=self.factor, mode=self.mode, align_corners=corners, antialias=self.smooth)


@layer("grid sample")
class GridSample(Layer):
    takes = ("image",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {
            "mode": rng.choice(("bilinear", "nearest", "bicubic")),
            "padding": rng.choice(("zeros", "border", "reflection")),
        }

    def __init__(self, stream: Stream, mode: str, padding: str) -> None:
        super().__init__(stream)
        self.mode, self.padding = mode, padding
        self.theta = nn.Parameter(torch.tensor([[0.9, 0.1, 0.0], [-0.1, 0.9, 0.1]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            wide = full_precision(x)
            theta = self.theta.to(wide.dtype).expand(x.shape[0], 2, 3)
            grid = F.affine_grid(theta, list(x.shape), align_corners=False)
            sampled = F.grid_sample(wide, grid, mode=self.mode, padding_mode=self.padding, align_corners=False)
        return sampled.to(x.dtype)


@layer("pad and crop")
class PadAndCrop(Layer):
    takes = CHANNELS_FIRST

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        modes = ("constant", "reflect", "replicate", "circular", "value")
        return {"mode": rng.choice(modes), "crop": rng.random() < 0.5}

    def __init__(self, stream: Stream, mode: str, crop: bool) -> None:
        super().__init__(stream)
        self.value, mode = 0.5 if mode == "value" else 0.0, "constant" if mode == "value" else mode
        self.mode = mode if stream.size > 1 else "constant"
        self.amounts, self.crop = [1, 0] * stream.spatial, crop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x, self.amounts, self.mode, self.value)
        return F.pad(x, [-1, 0]) if self.crop else x


@layer("pixel shuffle")
class PixelShuffle(Layer):
    takes = ("image",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"down": rng.random() < 0.5}

    def __init__(self, stream: Stream, down: bool) -> None:
        super().__init__(stream)
        self.steps: nn.Module = nn.Identity()
        if down and all(length % 2 == 0 for length in stream.shape[2:]) and stream.channels <= 8:
            self.steps = nn.PixelUnshuffle(2)
        elif not down and stream.channels % 4 == 0 and stream.size <= 16:
            self.steps = nn.PixelShuffle(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps(x)


@layer("channel shuffle")
class ChannelShuffle(Layer):
    takes = CHANNELS_FIRST

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self.groups = divisor(stream.channels, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.reshape(x.shape[0], self.groups, -1, *x.shape[2:])
        return parts.transpose(1, 2).reshape(x.shape)


@layer("unfold and fold")
class UnfoldAndFold(Layer):
    takes = ("image",)

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self.kernel = min(2, stream.size)
        width = stream.channels * self.kernel**2
        self.mixing = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = F.unfold(x, self.kernel)
        columns = self.mixing(columns.transpose(1, 2)).transpose(1, 2)
        return F.fold(columns.to(x.dtype), list(x.shape[2:]), self.kernel)


@layer("squeeze and excite")
class SqueezeAndExcite(Layer):
    takes = CHANNELS_FIRST

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"in_place": rng.random() < 0.5}

    def __init__(self, stream: Stream, in_place: bool) -> None:
        super().__init__(stream)
        self.down, self.up = nn.Linear(stream.channels, 4), nn.Linear(4, stream.channels)
        self.active = nn.ReLU(inplace=in_place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.up(self.active(self.down(x.flatten(2).mean(2)))).sigmoid()
        return x * scale.view(*scale.shape, *[1] * (x.dim() - 2))


@layer("to sequence")
class ToSequence(Layer):
    takes = CHANNELS_FIRST
    makes = "sequence"

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"contiguous": rng.random() < 0.5}

    def __init__(self, stream: Stream, contiguous: bool) -> None:
        super().__init__(stream)
        self.contiguous = contiguous

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2)[:, :, :64].transpose(1, 2)
        return tokens.contiguous() if self.contiguous else tokens


@layer("to rows")
class ToRows(Layer):
    takes = ("sequence", *CHANNELS_FIRST)
    makes = "rows"

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("mean", "max", "last", "flatten", "logsumexp"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how = how
        self.axes = [axis for axis in range(1, len(stream.shape)) if axis != stream.channel_axis]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "mean":
            return x.mean(self.axes)
        if self.how == "max":
            return x.amax(self.axes)
        if self.how == "logsumexp":
            return x.logsumexp(self.axes)
        if self.how == "flatten":
            return x.flatten(1)[:, :96]
        return x[:, -1] if self.axes == [1] else x.flatten(2)[:, :, -1]
