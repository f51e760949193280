"""Brings images to the 32 x 32 that LeNet-5 and VGG-16 were laid out for."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Fit32(nn.Module):
    """Images of 28 to 32 pixels a side get a border of zeros; others (8 x 8 digits) are resized."""

    def forward(self, x: Tensor) -> Tensor:
        """(count, channels, height, width) to (count, channels, 32, 32)."""
        height, width = x.shape[-2:]
        if not (28 <= height <= 32 and 28 <= width <= 32):
            return functional.interpolate(x, size=(32, 32), mode="bilinear", align_corners=False)
        rows, columns = 32 - height, 32 - width
        return functional.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
