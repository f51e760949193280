"""Dividing a batch: the water level, projections, and whole samples.

Everything works on arrays of shape (..., n), each row by itself. Limits are loads (or shares) of shape (n,) or
(..., n); limits that cannot hold the batch raise PacelineError and say by how much.
"""

from paceline.shares.level import WaterLevel, project, proportional, water_level
from paceline.shares.whole import whole_samples

__all__ = ["WaterLevel", "project", "proportional", "water_level", "whole_samples"]
