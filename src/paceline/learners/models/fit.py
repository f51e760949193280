"""Brings images to the size that a network of fixed size was laid out for."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

BORDER = 4  # pixels a side that zeros may add: MNIST's 28 become the 32 of LeNet-5


class Fit(nn.Module):
    """Images up to 4 pixels smaller than ``side`` get a border of zeros; others (8 x 8 digits) are resized."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        """(count, channels, height, width) to (count, channels, side, side)."""
        rows, columns = self.side - x.shape[-2], self.side - x.shape[-1]
        if rows == columns == 0:
            return x
        if not (0 <= rows <= BORDER and 0 <= columns <= BORDER):
            return functional.interpolate(x, size=(self.side,) * 2, mode="bilinear", align_corners=False)
        return functional.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
