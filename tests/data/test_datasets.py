"""Loading images: what comes back, and what is said when it cannot."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest

from paceline.data.datasets import IDX_NAMES, NPZ_NAMES, floats, load
from paceline.errors import PacelineError
from paceline.papers import data_folder
from support.guarantees import guarantee
from support.skips import with_data


def images(count=20, height=6, width=5, channels=None, seed=0):
    shape = (count, height, width) if channels is None else (count, height, width, channels)
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def arrays(**changes):
    labels = np.arange(20, dtype=np.uint8) % 4
    good = {"x_train": images(), "y_train": labels, "x_test": images(8, seed=1), "y_test": labels[:8]}
    return {name: array for name, array in (good | changes).items() if array is not None}


def save(folder, **changes):
    path = folder / "set.npz"
    np.savez(path, **arrays(**changes))
    return str(path)


def idx_bytes(array):
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, 8, array.ndim)) + sizes + array.tobytes()


def save_idx(folder, suffix="", **changes):
    packed = gzip.compress if suffix else bytes
    for name, file in zip(NPZ_NAMES, IDX_NAMES, strict=True):
        content = arrays().get(name)
        (folder / (file + suffix)).write_bytes(changes.get(name, packed(idx_bytes(content))))
    return str(folder)


def test_digits_are_scikit_learns():
    data = load("digits")
    assert data.x_train.shape == (1500, 1, 8, 8)
    assert data.x_test.shape == (297, 1, 8, 8)
    assert data.x_train.dtype == np.float32
    assert data.shape == (1, 8, 8)
    assert (data.classes, data.name) == (10, "digits")
    # The published sums of the set: 1797 images, mean grey level 4.884165, and its first row of pixels.
    grey = np.concatenate((data.x_train, data.x_test)) * 16
    assert grey.mean() == pytest.approx(4.884165, abs=1e-6)
    assert grey[0, 0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert np.concatenate((data.y_train, data.y_test))[:10].tolist() == list(range(10))


def test_keras_npz(tmp_path):
    data = load(save(tmp_path, x_train=images(channels=3), x_test=images(8, channels=3)))
    assert data.x_train.shape == (20, 3, 6, 5)
    assert data.x_train.dtype == np.uint8
    assert np.array_equal(data.x_train[3, 1], images(channels=3)[3, :, :, 1])
    assert data.y_train.dtype == np.int64
    assert (data.classes, data.name) == (4, "set")


def test_labels_in_a_column_and_grey_images_without_channels(tmp_path):
    data = load(save(tmp_path, y_train=(np.arange(20) % 4)[:, None]))
    assert data.x_train.shape == (20, 1, 6, 5)
    assert data.y_train.tolist() == [i % 4 for i in range(20)]


def test_floats_of_bytes_and_of_floats(tmp_path):
    as_floats = images().astype(np.float64) / 255
    data = load(save(tmp_path, x_train=as_floats, x_test=images(8)))
    assert data.x_train.dtype == np.float32
    assert np.allclose(floats(data.x_train)[:, 0], as_floats, atol=1e-7)
    assert floats(data.x_train) is data.x_train
    assert np.array_equal(floats(data.x_test)[:, 0], images(8).astype(np.float32) / np.float32(255))


def test_other_whole_numbers_become_bytes(tmp_path):
    data = load(save(tmp_path, x_train=images().astype(np.int32)))
    assert data.x_train.dtype == np.uint8
    assert np.array_equal(data.x_train[:, 0], images())


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_folder(tmp_path, suffix):
    data = load(save_idx(tmp_path, suffix))
    assert np.array_equal(data.x_train[:, 0], images())
    assert data.y_test.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert data.name == tmp_path.name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y_test": None}, "no array y_test"),
        ({"y_train": np.zeros(19, np.uint8)}, "20 images in x_train, 19 labels"),
        ({"x_test": images(8, 7, 5)}, r"\(1, 6, 5\).*\(1, 7, 5\)"),
        ({"x_train": images(channels=5)}, "shape"),
        ({"x_train": images()[0]}, "shape"),
        ({"x_train": images()[:0], "y_train": np.zeros(0, np.uint8)}, "empty"),
        ({"y_test": np.zeros(0, np.uint8)}, "empty"),
        ({"x_train": images().astype(float) - 1}, "goes from -1 to"),
        ({"x_train": np.full((20, 6, 5), np.nan)}, "goes from nan"),
        ({"x_train": images().astype(np.int16) + 1}, "0 to 255"),
        ({"x_train": images() > 7}, "of type bool"),
        ({"y_train": np.arange(20) % 4 - 1}, "label -1"),
        ({"y_train": np.arange(20) % 4 + 0.5}, "not whole numbers"),
        ({"y_train": np.full(20, np.nan)}, "not whole numbers"),
        ({"y_train": np.array(["cat"] * 20)}, "not whole numbers"),
        ({"y_train": np.r_[np.arange(19) % 4, 255]}, "goes up to 255, but only 5 labels occur"),
        ({"y_train": np.r_[np.arange(19) % 4, 2**60]}, "the label 1.15292e"),
        ({"y_test": np.arange(8) % 5}, "y_test holds the label 4, y_train 0 to 3"),
        ({"y_train": np.zeros((20, 2), np.uint8)}, "shape"),
        ({"y_train": np.array([object()] * 20)}, "Python objects"),
    ],
)
def test_bad_npz_raises_one_error(tmp_path, changes, words):
    with pytest.raises(PacelineError, match=words) as caught:
        load(save(tmp_path, **changes))
    assert "set.npz" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_npz(tmp_path):
    with pytest.raises(PacelineError, match=r"no such file.*digits"):
        load("digit")
    path = tmp_path / "set.npz"
    for content in (b"", b"hello", b"PK\x03\x04 not a zip"):
        path.write_bytes(content)
        with pytest.raises(PacelineError, match=r"not a readable \.npz"):
            load(str(path))
    save(tmp_path)
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(PacelineError, match=r"not a readable \.npz"):
        load(str(path))
    with path.open("wb") as file:
        np.save(file, images())
    with pytest.raises(PacelineError, match="one bare array"):
        load(str(path))


@guarantee(
    "Damaged images, traces and scenarios are refused with one message, traces with the line's number."
)
def test_a_flipped_byte_is_refused_or_changes_nothing(tmp_path):
    """Also where an archive says that there is a password, or another method: after each of zip's signatures."""
    path = Path(save(tmp_path, x_train=images(20, 2, 2), x_test=images(8, 2, 2)))
    whole, good = path.read_bytes(), load(str(path))
    near = {found.start() + k for found in re.finditer(b"PK", whole) for k in range(24)}
    places, refused = sorted(near | set(range(0, len(whole), 23))), 0
    for place in places:
        if place >= len(whole):
            break
        damaged = bytearray(whole)
        damaged[place] ^= (1, 0x20, 0x40, 0xFF)[place % 4]
        path.write_bytes(damaged)
        try:
            found = load(str(path))
        except PacelineError as error:
            assert str(path) in str(error)  # noqa: PT017
            refused += 1
            continue
        assert all(np.array_equal(one, other) for one, other in zip(found[:4], good[:4], strict=True))
    assert refused > len(places) / 3


def test_a_damaged_array(tmp_path):
    path = Path(save(tmp_path))
    content = bytearray(path.read_bytes())
    content[300] ^= 0xFF  # within the first array: its checksum no longer fits
    path.write_bytes(content)
    with pytest.raises(PacelineError, match="damaged"):
        load(str(path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_train": idx_bytes(images())[:-1]}, "asks for 616"),
        ({"x_train": idx_bytes(images()) + b"x"}, "asks for 616"),
        ({"x_train": idx_bytes(images())[:7]}, "within its header"),
        ({"x_train": b""}, "starts with nothing"),
        ({"x_train": idx_bytes(np.zeros(20, np.uint8))}, "starts with 00000801; expected 00000803"),
        ({"y_train": idx_bytes(np.zeros(7, np.uint8))}, "20 images in x_train, 7 labels"),
    ],
)
def test_bad_idx_raises_one_error(tmp_path, changes, words):
    with pytest.raises(PacelineError, match=words):
        load(save_idx(tmp_path, **changes))


def test_idx_missing_or_cut(tmp_path):
    folder = save_idx(tmp_path, ".gz")
    images_file = tmp_path / (IDX_NAMES[0] + ".gz")
    images_file.write_bytes(images_file.read_bytes()[:-20])
    with pytest.raises(PacelineError, match="cannot be read"):
        load(folder)
    images_file.unlink()
    with pytest.raises(PacelineError, match="no file train-images-idx3-ubyte or"):
        load(folder)


@with_data("mnist")
def test_mnist():
    data = load(str(data_folder() / "mnist"))
    assert data.x_train.shape == (60000, 1, 28, 28)
    assert data.x_test.shape == (10000, 1, 28, 28)
    assert floats(data.x_train).mean() == pytest.approx(0.1307, abs=1e-4)  # the mean everyone normalizes with
    assert data.y_train[:5].tolist() == [5, 0, 4, 1, 9]
