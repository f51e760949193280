"""A trained network in a file, for the next run to start from."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np

from paceline.errors import PacelineError
from paceline.files import open_file, write_whole
from paceline.forecast.networks import Network
from paceline.forecast.window import LearnedState
from paceline.rounds import Array

__all__ = ["load", "save"]


def save(path: Path, network: Network, state: LearnedState) -> None:
    """Write a trained model, whole or not at all; of many, the one most accurate of late, compared with EMA.

    network: that of the forecast whose state this is; the forecast's option ``model`` starts from the file.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = state.wrong[0] / state.wrong[1]
    flat = state.parameters.reshape(-1, network.parameters)
    ratio = (
        np.where(np.isnan(ratio), np.inf, ratio).reshape(len(flat), -1).mean(axis=1)
    )  # pooled: its workers
    content = io.BytesIO()
    np.savez(content, network=repr(network), parameters=flat[np.argmin(ratio)])
    write_whole(path, content.getvalue())


def load(path: Path, network: Network) -> Array:
    """The parameters in a file that ``save`` wrote, shape (P,)."""
    try:
        with open_file(path) as opened, np.load(opened, allow_pickle=False) as file:
            stored, parameters = str(file["network"]), np.asarray(file["parameters"], float)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise PacelineError(
            f"{path} is no saved forecast model ({error}); expected a file that save wrote"
        ) from None
    if stored != repr(network) or parameters.shape != (network.parameters,):
        raise PacelineError(f"{path} holds {stored}, but {network!r} is asked for; choose the same options")
    if not np.isfinite(parameters).all():
        raise PacelineError(f"{path} holds numbers that are not finite; expected a file that save wrote")
    return parameters
