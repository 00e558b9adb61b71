"""The UNet of MONeT's benchmarks: images grow by adaptive pooling, so that every layer has a lean form there."""

from itertools import pairwise

import torch
from torch import nn


class UNet(nn.Module):
    def __init__(self, height: int = 416, width: int = 608) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 512)
        self.stem = _twice(3, 64, 64)
        self.down = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), _twice(a, b, b)) for a, b in pairwise(widths))
        sizes = [(height // part, width // part) for part in (8, 4, 2, 1)]
        self.grow = nn.ModuleList(nn.AdaptiveAvgPool2d(size) for size in sizes)
        self.up = nn.ModuleList(_twice(a, a // 2, b) for a, b in ((1024, 256), (512, 128), (256, 64), (128, 64)))
        self.head = nn.Conv2d(64, 1, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        skips = [self.stem(images)]
        for down in self.down:
            skips.append(down(skips[-1]))
        values = skips.pop()
        for grow, up in zip(self.grow, self.up, strict=True):
            values = up(torch.cat([skips.pop(), grow(values)], dim=1))
        result: torch.Tensor = self.head(values)
        return result


def _twice(inputs: int, middle: int, outputs: int) -> nn.Sequential:
    layers = []
    for narrow, wide in ((inputs, middle), (middle, outputs)):
        layers += [nn.Conv2d(narrow, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)
