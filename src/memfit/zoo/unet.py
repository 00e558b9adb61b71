"""The classic UNet: four levels down, four up, skip connections by concatenation."""

from itertools import pairwise

import torch
from torch import nn


class UNet(nn.Module):
    """Segments an image into classes; height and width are multiples of 16."""

    def __init__(self, in_channels: int, classes: int, width: int = 64) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.stem = _convolutions(in_channels, widths[0])
        self.down = nn.ModuleList(_convolutions(*pair) for pair in pairwise(widths))
        self.pool = nn.MaxPool2d(2)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, stride=2) for narrow, wide in pairwise(widths))
        self.up = nn.ModuleList(_convolutions(2 * narrow, narrow) for narrow in widths[:-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = self.stem(image)
        skips = []
        for down in self.down:
            skips.append(features)
            features = down(self.pool(features))
        for grow, up in zip(reversed(self.grow), reversed(self.up), strict=True):
            features = up(torch.cat([skips.pop(), grow(features)], dim=1))
        classes: torch.Tensor = self.head(features)
        return classes


def _convolutions(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )
