"""The shapes that people train and serve with, against the best call that torch itself offers.

Torch's call gets nothing, `is_causal`, or a boolean mask of the same pairs, made beforehand: what
one would write by hand. Samples are padded on the right, each to another length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from attnspec.bench.timing import Timing, alternate
from attnspec.spec import Spec, parse
from benchmarks.cases import SHAPE_PATTERNS, SIZE, Settings, Shape
from benchmarks.measuring import Json, geometric_mean

MODES = ("forward", "training")

OURS, TORCH = "ours", "torch"

CEILING, MEAN = 1.25, 0.9
"""The targets: no row above the first times torch's own call, and the geometric mean."""


@dataclass(frozen=True)
class Row:
    """A pattern at a shape, padded or not."""

    pattern: str
    shape: Shape
    padded: bool

    def subjects(self, mode: str) -> dict[str, Callable[[], object]]:
        """Both sides of the comparison."""
        shape = self.shape
        spec = parse(f"attention measured {{ {SHAPE_PATTERNS[self.pattern]} }}")
        module = spec.compile()
        generator = torch.Generator().manual_seed(0)
        sizes = (shape.batch, shape.heads, shape.n, SIZE)
        inputs = tuple(torch.randn(sizes, generator=generator) for _ in range(3))
        padding = padding_of(shape) if self.padded else None
        held = pairs_of(spec, shape)
        offered = torch_call(held, padding)

        def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = module(q, k, v, key_padding_mask=padding)
            return out

        return {OURS: called(ours, inputs, mode), TORCH: called(offered, inputs, mode)}


def pairs_of(spec: Spec, shape: Shape) -> torch.Tensor:
    """The pairs of all heads, bool [n, n], or those of each, bool [H, n, n], where they differ."""
    differ = len({spec.relation(shape.n, head=head) for head in range(shape.heads)}) > 1
    masks = [spec.mask(shape.n, head=head) for head in range(shape.heads if differ else 1)]
    return torch.from_numpy(np.stack(masks) if differ else masks[0])


def padding_of(shape: Shape) -> torch.Tensor:
    """Real keys of samples of unequal lengths, the first of them whole: bool [B, n]."""
    lengths = shape.n - torch.arange(shape.batch) * shape.n // (2 * shape.batch)
    if shape.batch == 1:
        lengths = lengths - shape.n // 4
    return torch.arange(shape.n) < lengths[:, None]


def torch_call(held: torch.Tensor, padding: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """The least that says the pairs `held`, bool [n, n] or [H, n, n], to torch."""
    causal = bool((held == torch.ones_like(held).tril()).all())

    def offered(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=plain)

    plain, mask = causal and padding is None, None
    if padding is not None:
        mask = padding[:, None, None] if bool(held.all()) else held & padding[:, None, None]
    elif not causal and not bool(held.all()):
        mask = held
    return offered


def called(
    attention: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], mode: str
) -> Callable[[], object]:
    """One call without gradients, or one with the gradients of q, k and v."""

    def forward() -> object:
        with torch.no_grad():
            return attention(*inputs)

    def training() -> object:
        return torch.autograd.grad(attention(*given), given, upstream)

    if mode == "forward":
        return forward
    given = [x.clone().requires_grad_() for x in inputs]
    upstream = torch.ones_like(inputs[0])
    return training


def measure(settings: Settings) -> dict[str, Json]:
    """Every pattern at every shape, with and without padding, forward and training."""
    rows: list[Json] = []
    ratios: dict[str, list[float]] = {mode: [] for mode in MODES}
    for shape in settings.shapes:
        for pattern in SHAPE_PATTERNS:
            for padded in (False, True):
                row = Row(pattern, shape, padded)
                found: dict[str, Json] = {}
                for mode in MODES:
                    timed = alternate(row.subjects(mode), settings.rounds)
                    ratio = timed[OURS].median / timed[TORCH].median
                    ratios[mode].append(ratio)
                    found[mode] = _both(timed, ratio)
                spec = parse(f"attention measured {{ {SHAPE_PATTERNS[pattern]} }}")
                steps = spec.plan(shape.n).steps
                rows.append(
                    {
                        "name": pattern,
                        "shape": str(shape),
                        "padded": padded,
                        "backends": [step.chosen.name for step in steps],
                        **found,
                    }
                )
    summary: dict[str, Json] = {
        mode: {
            "mean": geometric_mean(values),
            "most": max(values),
            "above": sum(value > CEILING for value in values),
            "rows": len(values),
        }
        for mode, values in ratios.items()
        if values
    }
    return {"rows": rows, "summary": summary}


def _both(timed: Mapping[str, Timing], ratio: float) -> dict[str, Json]:
    return {"ratio": ratio, **{name: found.data() for name, found in timed.items()}}
