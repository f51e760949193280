"""Forecasts of each worker's speed in the next round; ``create("ema:gain=0.2")`` makes one by name."""

from __future__ import annotations

from functools import cache

from paceline import options
from paceline.forecast.arima import Arima
from paceline.forecast.ema import Ema, Last, Ratio
from paceline.forecast.learned import Narx, Recurrent
from paceline.forecast.protocol import AnyForecast, Forecast, Reading
from paceline.forecast.tracking import Tracking

FORECASTS: dict[str, type[AnyForecast]] = {
    "arima": Arima,
    "last": Last,
    "narx": Narx,
    "recurrent": Recurrent,
    "tracking": Tracking,
    "ratio": Ratio,
    "ema": Ema,
}
"""Every forecast's class, by its name for ``create``."""


def create(text: str) -> AnyForecast:
    """Make the forecast named by ``text``.

    Args:
        text: ``name`` or ``name:key=value,...``; ";" for "," if nested in a policy's text.

    Returns:
        The forecast; forecasts are frozen, and equal texts give the same one.

    Raises:
        PacelineError: For an unknown name or option, or an invalid value.
    """
    return made(text) if isinstance(text, str) else options.build(FORECASTS, text, "forecast")


@cache  # policies call it in each round, and a forecast never changes
def made(text: str) -> AnyForecast:
    """The same for text that ``create`` has accepted."""
    return options.build(FORECASTS, text.replace(";", ","), "forecast")


__all__ = ["FORECASTS", "AnyForecast", "Forecast", "Reading", "create"]
