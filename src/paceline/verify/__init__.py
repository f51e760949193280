"""Whether a ported program trains the same model however its batches are divided among ranks, found by running it.

The program runs for a few steps with equal loads, with equal loads again, with uneven loads, and with a rank that has
no samples. ``inside`` enters each of its processes, gives ranks these loads, and makes everything else the same: the
initial parameters, and the random numbers that belong to a sample (``draws``). Each rank writes down what reaches its
optimizer's steps (``record``). ``compare`` finds what differs between the runs, and ``verdict`` says it.
"""

from __future__ import annotations

STEPS = 5
"""The default number of optimizer steps of each run."""

__all__ = ["STEPS"]
