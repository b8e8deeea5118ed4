"""The definitions on arrays of numpy, for those who measure and need no torch of their own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from attnspec.backends.factored.definitions import defined
from attnspec.lower.work import Work


def weights_array(
    work: Work, head: int, q: np.ndarray, k: np.ndarray, learned: Mapping[str, np.ndarray]
) -> np.ndarray:
    """The weights [n_q, n_k] of one head of a mechanism, also of one that never forms them: the
    output for values that are the rows of the identity."""
    rows, keys = torch.from_numpy(q), torch.from_numpy(k)
    parts = {name: torch.from_numpy(each) for name, each in learned.items()}
    values = torch.eye(len(k), dtype=keys.dtype)
    return np.asarray(defined(work, head, rows, keys, values, parts).numpy())
