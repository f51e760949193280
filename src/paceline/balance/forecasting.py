"""What policies that plan by a forecast have in common."""

from __future__ import annotations

from paceline import forecast
from paceline.forecast import AnyForecast


class Forecasting:
    """Says what the forecast of a policy says of itself.

    forecast: its name, with its options after a colon and ";" between them.
    """

    forecast: str

    @property
    def needs_readings(self) -> bool:
        """Whether the forecast reads Round.cpu and memory."""
        return self.forecaster().needs_readings

    @property
    def trains(self) -> bool:
        """Whether the forecast fits a model, which engines do aside."""
        return self.forecaster().trains

    def forecaster(self) -> AnyForecast:
        """The forecast. Raises PacelineError for an unknown one."""
        return forecast.create(self.forecast)
