"""What others have published on tasks of the same kind, to be seen beside ours."""

from __future__ import annotations

from collections.abc import Mapping

SOURCE = "Tay et al. 2020, Long Range Arena"

PUBLISHED: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "sequential digits": (
        "LRA, pixels of CIFAR-10",
        {
            "softmax": 42.44,
            "window": 41.46,
            "Longformer": 42.22,
            "BigBird": 40.83,
            "Sparse Transformer": 44.24,
            "linear": 42.34,
            "FAVOR+": 42.77,
            "Linformer": 38.56,
            "Synthesizer": 41.61,
        },
    ),
    "ListOps": (
        "LRA, ListOps",
        {
            "softmax": 36.37,
            "window": 15.82,
            "Longformer": 35.63,
            "BigBird": 36.05,
            "Sparse Transformer": 17.07,
            "linear": 16.13,
            "FAVOR+": 18.01,
            "Linformer": 35.70,
            "Synthesizer": 36.99,
        },
    ),
}
"""Accuracies in percent by task: what they are of, and by system. That arena's ListOps came without
its brackets."""
