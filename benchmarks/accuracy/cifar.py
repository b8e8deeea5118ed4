"""CIFAR-10 from a folder that the user points at, read as data and nothing else.

The files are pickles, which can run anything when they are loaded: only what an array of bytes, a
list of numbers and their names need is allowed here.
Source: Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images".
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy._core import multiarray

TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = ("test_batch",)
PIXELS = 32 * 32
GREY = np.array([0.299, 0.587, 0.114])
"""The weights of red, green and blue in a shade of grey, ITU-R BT.601."""


def _encoded(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in the old protocol."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes are written as latin1, got {encoding!r}")
    return text.encode("latin1")


_ALLOWED = {
    ("_codecs", "encode"): _encoded,
    ("numpy.core.multiarray", "_reconstruct"): multiarray._reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): multiarray._reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _Data(pickle.Unpickler):
    """Loads arrays, lists, dicts, strings and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"`{module}.{name}` has no place in a file of images")
        return found


def cifar10(folder: Path) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Training and test images: shades int64 [m, 1024] and labels int64 [m].

    Raises FileNotFoundError for a missing file, ValueError for one that holds something else.
    """
    return tuple(_part(folder, names) for names in (TRAIN, TEST))


def _part(folder: Path, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    shades, labels = zip(*(_read(folder / name) for name in names), strict=True)
    return np.concatenate(shades), np.concatenate(labels)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} must stand in the folder of CIFAR-10")
    try:
        found = _Data(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} is not a file of CIFAR-10: {error}") from None
    if not isinstance(found, dict) or not {b"data", b"labels"} <= set(found):
        raise ValueError(f"{path.name} must hold `data` and `labels`")
    data, labels = np.asarray(found[b"data"]), np.asarray(found[b"labels"])
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3 * PIXELS:
        raise ValueError(
            f"the images of {path.name} must be bytes [m, {3 * PIXELS}], got {data.dtype}"
            f" {list(data.shape)}"
        )
    if labels.shape != data.shape[:1] or labels.dtype.kind != "i":
        raise ValueError(f"{path.name} must have one whole number as label for each image")
    if len(labels) and not 0 <= labels.min() <= labels.max() < 10:
        raise ValueError(f"the labels of {path.name} must be between 0 and 9")
    grey = np.tensordot(GREY, data.reshape(-1, 3, PIXELS).astype(np.float64), (0, 1))
    return np.rint(grey).astype(np.int64), labels.astype(np.int64)
