"""What the parts of a run share: the tensors, the planner's word, and the file of figures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from typing import TypeAlias

import torch

from attnspec.ir.serial import Plain
from attnspec.spec import Spec
from benchmarks.cases import BATCH, HEADS, SIZE

Json: TypeAlias = Plain
"""A JSON value."""

PACKAGES = ("torch", "numpy", "transformers")
"""Whose versions stand beside the figures."""


def tensors(
    n: int, grad: bool = False, batch: int = BATCH, heads: int = HEADS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of every measurement, the same numbers each time."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, n, SIZE)
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_(grad) for _ in range(3))
    return q, k, v


def planned(spec: Spec, n: int) -> dict[str, Json]:
    """What the planner chooses at n, and the seconds that it expects of all heads, forward."""
    plan = spec.plan(n)
    seconds = 0.0
    for step in plan.steps:
        heads = HEADS if step.heads is None else len(step.heads)
        seconds += heads * len(step.layers) * (step.candidates[0].seconds or 0.0)
    return {
        "backends": [step.chosen.name for step in plan.steps],
        "predicted": seconds,
        "plan": [*str(plan).splitlines()],
    }


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers, at least one."""
    return exp(statistics.fmean(log(value) for value in values))


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """The slope of a straight line through the logarithms, by least squares."""
    line = statistics.linear_regression([log(n) for n in lengths], [log(value) for value in values])
    return line.slope


def read(path: Path) -> dict[str, Json]:
    """The figures in a file, {} where there is none."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} must hold an object, got {type(found).__name__}")
    return found


def write(path: Path, figures: Mapping[str, Json]) -> None:
    """Figures as JSON, whole or not at all; ValueError for a number that JSON does not have."""
    text = json.dumps(figures, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
