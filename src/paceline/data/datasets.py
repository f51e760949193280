"""Images to train on: the embedded handwritten digits, a .npz file as Keras writes it, or the four IDX files.

    data = load("digits")
    x = floats(data.x_train[:32])  # float32, shape (32, 1, 8, 8), in [0, 1]

Images that a file holds as bytes stay bytes in memory, a quarter of the size, and are converted to floats one batch
at a time (``floats``). Images that a file holds as floats, and the small digits, are float32 from the start.
"""

from __future__ import annotations

import gzip
import tokenize
import zipfile
import zlib
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError

__all__ = ["Data", "floats", "load"]

Images = NDArray[np.uint8] | NDArray[np.float32]
Labels = NDArray[np.int64]

DIGITS_TRAIN = 1500  # of 1797; the last 297 are the test set
IDX_NAMES = (
    *("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    *("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)
NPZ_NAMES = ("x_train", "y_train", "x_test", "y_test")
DAMAGED = (  # raised by zipfile and numpy, depending on the wrong byte (a flag may claim a password or method)
    OSError, ValueError, EOFError, RuntimeError, MemoryError, OverflowError, SyntaxError,
    zipfile.BadZipFile, zlib.error, tokenize.TokenError,
)  # fmt: skip


class Data(NamedTuple):
    """A data set in memory.

    Attributes:
        x_train: Images, shape (count, channels, height, width); uint8, or float32 in [0, 1].
        y_train: Labels from 0 to classes - 1, int64, shape (count,).
        x_test: Images, shape (count, channels, height, width); uint8, or float32 in [0, 1].
        y_test: Labels from 0 to classes - 1, int64, shape (count,).
        classes: Number of classes.
        name: The data's name, for a run's record.
    """

    x_train: Images
    y_train: Labels
    x_test: Images
    y_test: Labels
    classes: int
    name: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """One image's (channels, height, width)."""
        channels, height, width = self.x_train.shape[1:]
        return channels, height, width


def floats(images: Images) -> NDArray[np.float32]:
    """Images as float32 in [0, 1].

    Args:
        images: Bytes from 0 to 255, or floats in [0, 1], of any shape.

    Returns:
        The same shape; bytes are divided by 255, floats are returned unchanged.
    """
    if images.dtype == np.uint8:
        return images.astype(np.float32) / np.float32(255)
    return images  # type: ignore[return-value]


def load(spec: str) -> Data:
    """Load ``digits`` (embedded), a .npz with x_train, y_train, x_test, y_test, or a folder of IDX files.

    A .npz holds images of shape (count, height, width) or (count, height, width, channels), bytes from 0 to
    255 or floats in [0, 1], and labels of shape (count,) or (count, 1). A folder holds the four IDX files
    under MNIST's names, plain or as .gz.

    Args:
        spec: "digits", or a path.

    Returns:
        The data, in memory.

    Raises:
        PacelineError: If data are missing, damaged or do not fit together.
    """
    if spec == "digits":
        return _digits()
    path = Path(spec)
    if path.is_dir():
        parts = zip(NPZ_NAMES, IDX_NAMES, (3, 1, 3, 1), strict=True)
        arrays = {name: _idx_array(path, file, dimensions) for name, file, dimensions in parts}
    elif path.is_file():
        arrays = _read_npz(path)
    else:
        raise PacelineError(
            f"data {spec!r}: no such file or folder; expected digits, a .npz file, or a folder of IDX files"
        )
    return _assemble(arrays, path)


def _digits() -> Data:
    with resources.files("paceline.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        images = arrays["images"][:, None].astype(np.float32) / np.float32(16)  # grey levels 0 to 16
        labels = arrays["labels"].astype(np.int64)
    train, test = slice(None, DIGITS_TRAIN), slice(DIGITS_TRAIN, None)
    return Data(images[train], labels[train], images[test], labels[test], 10, "digits")


def _read_npz(path: Path) -> dict[str, NDArray[Any]]:
    try:
        archive = np.load(path, allow_pickle=False)
    except DAMAGED as error:
        raise PacelineError(
            f"{path}: not a readable .npz file; expected one with {', '.join(NPZ_NAMES)}"
        ) from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise PacelineError(f"{path}: holds one bare array; expected a .npz with {', '.join(NPZ_NAMES)}")
    arrays = {}
    with archive:
        for name in NPZ_NAMES:
            if name not in archive.files:
                held = ", ".join(archive.files) or "nothing"
                raise PacelineError(
                    f"{path}: no array {name} (it holds {held}); expected {', '.join(NPZ_NAMES)}"
                )
            try:
                arrays[name] = archive[name]
            except ValueError as error:
                raise PacelineError(
                    f"{path}: {name} holds Python objects or is damaged; expected plain numbers"
                ) from error
            except DAMAGED as error:
                raise PacelineError(f"{path}: {name} is damaged; fetch or write the file again") from error
    return arrays


def _idx_array(folder: Path, name: str, dimensions: int) -> NDArray[np.uint8]:
    """One IDX file: 0, 0, 8 for bytes, the number of dimensions, each as a big-endian uint32, the bytes."""
    path = folder / name if (folder / name).is_file() else folder / f"{name}.gz"
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
    except FileNotFoundError:
        raise PacelineError(
            f"{folder}: no file {name} or {name}.gz; expected the four IDX files under MNIST's names"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise PacelineError(f"{path}: cannot be read ({error}); fetch or write the file again") from error
    header = 4 + 4 * dimensions
    magic = bytes((0, 0, 8, dimensions))
    if raw[:4] != magic:
        raise PacelineError(
            f"{path}: starts with {raw[:4].hex() or 'nothing'}; expected {magic.hex()}, as IDX does"
        )
    if len(raw) < header:
        raise PacelineError(
            f"{path}: {len(raw)} bytes, cut off within its header of {header}; fetch or write it again"
        )
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", dimensions, offset=4))
    expected = header + int(np.prod([float(size) for size in shape]))
    if len(raw) != expected:
        raise PacelineError(
            f"{path}: {len(raw)} bytes, but its header {shape} asks for {expected}; fetch or write it again"
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def _assemble(arrays: dict[str, NDArray[Any]], path: Path) -> Data:
    x_train, x_test = (_images(arrays[name], f"{path}: {name}") for name in ("x_train", "x_test"))
    y_train, y_test = (_labels(arrays[name], f"{path}: {name}") for name in ("y_train", "y_test"))
    for part, images, labels in (("train", x_train, y_train), ("test", x_test, y_test)):
        if len(images) != len(labels):
            raise PacelineError(
                f"{path}: {len(images)} images in x_{part}, {len(labels)} labels in y_{part}; "
                "expected equal numbers"
            )
    if x_train.shape[1:] != x_test.shape[1:]:
        raise PacelineError(
            f"{path}: x_train holds images of shape {x_train.shape[1:]}, x_test of {x_test.shape[1:]}; "
            "expected one shape"
        )
    seen, classes = len(np.unique(y_train)), int(y_train.max()) + 1
    if 2 * seen < classes:  # otherwise one wrong label would mean hundreds of classes
        raise PacelineError(
            f"{path}: y_train goes up to {classes - 1}, but only {seen} labels occur; "
            "expected labels 0 to classes - 1"
        )
    if y_test.max() >= classes:
        raise PacelineError(
            f"{path}: y_test holds the label {y_test.max()}, y_train 0 to {classes - 1}; "
            "expected the same classes"
        )
    name = path.stem if path.is_file() else path.resolve().name
    return Data(x_train, y_train, x_test, y_test, classes, name)


def _images(array: NDArray[Any], where: str) -> Images:
    """Images as (count, channels, height, width), uint8 or float32."""
    if array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[3] not in (1, 3, 4)):
        raise PacelineError(f"{where} has shape {array.shape}; expected (count, height, width[, channels])")
    if array.size == 0:
        raise PacelineError(f"{where} is empty, shape {array.shape}; expected at least one image")
    array = array[:, None] if array.ndim == 3 else array.transpose(0, 3, 1, 2)
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype.kind not in "iuf":
        raise PacelineError(
            f"{where} is of type {array.dtype}; expected whole numbers 0 to 255, or floats in [0, 1]"
        )
    low, high = array.min(), array.max()  # NaN passes through both
    top = 1 if array.dtype.kind == "f" else 255
    if not (low >= 0 and high <= top):
        raise PacelineError(
            f"{where} goes from {low:g} to {high:g}; expected whole numbers 0 to 255, or floats in [0, 1]"
        )
    return np.ascontiguousarray(array.astype(np.float32 if top == 1 else np.uint8))


def _labels(array: NDArray[Any], where: str) -> Labels:
    """Labels as int64, shape (count,)."""
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise PacelineError(f"{where} has shape {array.shape}; expected (count,) or (count, 1)")
    if array.size == 0:
        raise PacelineError(f"{where} is empty; expected at least one label")
    if array.dtype.kind not in "iuf" or not np.all(array == np.floor(array)):
        raise PacelineError(
            f"{where} holds {array.dtype} values that are not whole numbers; expected labels 0, 1, 2, ..."
        )
    if array.min() < 0 or array.max() >= 1_000_000:
        wrong = array.min() if array.min() < 0 else array.max()
        raise PacelineError(f"{where} holds the label {wrong:g}; expected labels 0 to classes - 1")
    return np.ascontiguousarray(array, np.int64)
