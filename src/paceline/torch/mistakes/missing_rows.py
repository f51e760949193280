"""Batches with fewer rows than planned samples, such as those of a collate function that drops samples."""

from __future__ import annotations

from typing import Any

import torch

from paceline.torch.batches import PLAIN, all_shapes


class RowCheck:
    """Finds them. It reports only certain cases: all tensors of the batch have the same number of rows, and none of
    their dimensions is the planned number or a multiple of it. A collate function may merge several samples into one
    row, as long as it does so in every batch.
    """

    def __init__(self) -> None:
        self._whole = False  # some batch had a row for each sample

    def missing(self, batch: Any, samples: int) -> int | None:
        """The number of rows of a batch in which some of the planned samples are missing; else None."""
        first = batch[0] if batch.__class__ in PLAIN and batch else None  # the tensor of most batches
        if first.__class__ is torch.Tensor and first.shape[:1] == (samples,):
            self._whole = True
            return None
        shapes = all_shapes(batch)
        rows = {shape[0] for shape in shapes or ()}
        if shapes is None or len(rows) != 1:
            return None
        found = rows.pop()
        self._whole = self._whole or found == samples
        # A list may hold one tensor or more for each sample.
        apart = isinstance(batch, list | tuple) and len(batch) % samples == 0
        # In tensors of two or more dimensions time may come first.
        later = min(map(len, shapes)) > 1 and any(shape[1] % samples == 0 for shape in shapes)
        merged = found and samples % found == 0 and not self._whole
        return None if found >= samples or apart or later or merged else found
