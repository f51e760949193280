"""Coordinates, paths and pixels for the charts. An SVG goes from 0 to 1000 on both axes, y downwards."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from paceline.runs.run import Array


def down(values: Array, end: float) -> Array:
    """Values as SVG coordinates: 0 at the bottom, ``end`` at the top, what lies above just outside."""
    return 1000 - np.clip(values / end, -0.02, 1.02) * 1000


def path(x: Array, y: Array) -> str:
    """Straight lines through the points, broken at NaN."""
    parts, pen = [], "M"
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if b != b or a != a:
            pen = "M"
            continue
        parts.append(f"{pen}{a:.1f} {b:.1f}")
        pen = "L"
    return "".join(parts)


def band(x: Array, low: Array, high: Array) -> str:
    """The area between two curves, each stretch without NaN closed by itself."""
    known = ~(np.isnan(low) | np.isnan(high))
    breaks = np.flatnonzero(np.diff(np.concatenate(([0], known.astype(int), [0]))))
    parts = []
    for start, end in breaks.reshape(-1, 2):
        part = slice(start, end)
        there, back = path(x[part], high[part]), path(x[part][::-1], low[part][::-1])
        parts.append(f"{there}L{back[1:]}Z")
    return "".join(parts)


def box(start: float, width: float, y: float, height: float, span: float) -> str:
    """A box from ``start``, ``width`` long, of seconds on a scale that ends at ``span``."""
    left, width = start / span * 1000, width / span * 1000
    return f"M{left:.1f} {y:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z"


def whole(values: Array) -> list[int | None]:
    """Coordinates for the tooltips' data; None where unknown."""
    return [None if value != value else round(value) for value in values.tolist()]


# Anchors of cividis, which people with any colour vision read in the same order.
_CIVIDIS = np.array(
    [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
     [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56]]
)  # fmt: skip


def colours(scale: Array) -> NDArray[np.uint8]:
    """Colours for values from 0 to 1, shape (..., 3); grey where unknown."""
    places = np.linspace(0, 1, len(_CIVIDIS))
    known = np.nan_to_num(scale)
    rgb = np.stack([np.interp(known, places, _CIVIDIS[:, channel]) for channel in range(3)], axis=-1)
    return np.where(np.isnan(scale)[..., None], 160, rgb).astype(np.uint8)


def png(pixels: NDArray[np.uint8]) -> bytes:
    """An image of shape (height, width, 3) as a PNG file."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = zlib.compress(rows, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")
