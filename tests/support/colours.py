"""How well a colour is seen on another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Light = NDArray[np.float64]  # of red, green and blue, shape (3,)


def linear(text: str) -> Light:
    """The light of a colour's red, green and blue; the colour as six hexadecimal digits."""
    value = np.array([int(text[i : i + 2], 16) for i in (0, 2, 4)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(one: Light, other: Light) -> float:
    """Of WCAG 2: from 1 to 21."""
    low, high = sorted(float(each @ [0.2126, 0.7152, 0.0722]) for each in (one, other))
    return (high + 0.05) / (low + 0.05)
