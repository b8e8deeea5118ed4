"""What is measured, as data: patterns at their sizes, and how far each run goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt

from attnspec.spec import Spec, parse

BATCH, HEADS, SIZE = 1, 4, 64
"""The shape of every measurement, float32."""


@dataclass(frozen=True)
class Case:
    """A pattern under a short name; `body` is what stands in the braces of its attention.

    `{rows}` and `{columns}` in the body are the sides of a grid of n cells, `{n}` is n. `slowest`
    is the target for the exponent of its time in n, None where there is none.
    """

    name: str
    body: str
    slowest: float | None = None

    def text(self, n: int) -> str:
        """The spec's text at n positions."""
        rows = next(side for side in range(isqrt(n), 0, -1) if n % side == 0)
        sides = {"{rows}": str(rows), "{columns}": str(n // rows)}
        sides["{n}"] = str(n)
        body = self.body
        for mark, side in sides.items():
            body = body.replace(mark, side)
        return f"attention measured {{ {body} }}"

    def spec(self, n: int) -> Spec:
        """The spec at n positions."""
        return parse(self.text(n))

    def edges(self, n: int) -> float:
        """Pairs of one head, the mean over `HEADS` heads where each draws its own."""
        spec = self.spec(n)
        relations = [spec.relation(n, head=head) for head in range(HEADS)]
        counted = {relation: relation.edges(n) for relation in set(relations)}
        return sum(counted[relation] for relation in relations) / HEADS


BANDED = (
    Case("window(256)", "attend window(radius = 256)", 1.1),
    Case("causal window(511)", "attend window(before = 511, after = 0)", 1.1),
    Case("dilated(2048, 8)", "attend dilated(radius = 2048, step = 8)", 1.1),
    Case("strided(128)", "attend strided(stride = 128)"),
    Case("causal strided(128)", "causal attend strided(stride = 128)"),
    Case("fixed(128, 8)", "attend fixed(stride = 128, cells = 8)"),
    Case("Longformer 256 + 64", "attend window(radius = 256) | global(first(64))", 1.1),
    Case(
        "BigBird 64, 3",
        "attend block(size = 64, before = 1, after = 1) | global(first(64) | last(64))"
        " | random_blocks(size = 64, blocks = 3, seed = 7)",
        1.1,
    ),
    Case(
        "neighborhood(21, 21)", "sequence grid({rows}, {columns}) attend neighborhood(21, 21)", 1.1
    ),
)
"""Patterns whose pairs can be brought close together; the target is on their geometric mean."""

SCATTERED = (
    Case("powers(2)", "attend powers(base = 2)", 1.2),
    Case("expander(32)", "attend expander(degree = 32, seed = 0)", 1.1),
    Case("random(32)", "attend random(keys = 32, seed = 0)", 1.1),
)
"""Patterns of low degree whose pairs lie anywhere: memory limits them."""

BY_ROOT = (
    Case("strided(√n)", "attend strided(stride = isqrt(n))", 1.6),
    Case("causal strided(√n)", "causal attend strided(stride = isqrt(n))", 1.6),
    Case("fixed(√n, 8)", "attend fixed(stride = isqrt(n), cells = 8)", 1.6),
)
"""Patterns of about n√n pairs."""

MECHANISMS = (
    Case("linear", "attend linear()", 1.1),
    Case("causal linear", "causal attend linear()", 1.1),
    Case("causal FAVOR+ 256", "causal attend favor(features = 256, seed = 0)", 1.1),
    Case("Nyström 64", "attend nystrom(landmarks = 64, conv = 33)", 1.1),
    Case("Linformer 256", "attend linformer(rank = 256, share = head, max_length = {n})", 1.1),
    Case("FNet", "attend fourier()", 1.2),
    Case("window(256) + linear", "causal attend window(before = 256, after = 0) + linear()", 1.1),
)
"""Mechanisms, and one that shares its denominator with a window: linear in n, but for FNet's
transforms, which take n log n."""

CASES: Mapping[str, Case] = {
    case.name: case for case in (*BANDED, *SCATTERED, *BY_ROOT, *MECHANISMS)
}

GROWING = tuple(case.name for case in CASES.values() if case.slowest is not None)
"""Patterns with a target for their growth."""

ETA_TARGETS = {"forward": 0.6, "both": 0.5}
"""The targets for the geometric means of the efficiency of `BANDED`."""


@dataclass(frozen=True)
class Shape:
    """Samples, heads and positions of a call."""

    batch: int
    heads: int
    n: int

    def __str__(self) -> str:
        return f"{self.batch} × {self.heads} × {self.n:,}"


SHAPE_PATTERNS: Mapping[str, str] = {
    "full": "attend full",
    "causal": "causal attend full",
    "window(64)": "attend window(radius = 64)",
    "causal window(200)": "causal attend window(before = 200, after = 0)",
    "sinks": "causal attend window(before = 128, after = 0) | global(first(4))",
    "BigBird 64/2": "attend block(size = 64, before = 1, after = 1) | global(first(64))"
    " | random_blocks(size = 64, blocks = 2, seed = 7)",
    "causal stride 32": "causal attend strided(stride = 32)",
}
"""What is run at the shapes that people use."""

SHAPES = (Shape(1, 12, 128), Shape(8, 12, 128), Shape(8, 12, 512), Shape(2, 12, 2048))
"""Those that the targets are on."""


@dataclass(frozen=True)
class Settings:
    """How far a run goes: lengths, patterns by name, and how often each is timed.

    `first` are the lengths of first calls, of so many specs of the zoo, None for all, and
    `changing` how many calls have a length of their own.
    """

    name: str
    rounds: int
    n: int
    efficiency: tuple[str, ...]
    growth: tuple[int, ...]
    growing: tuple[str, ...]
    shapes: tuple[Shape, ...]
    first: tuple[int, ...]
    first_zoo: int | None
    changing: int


_LISTED = tuple(case.name for case in (*BANDED, *SCATTERED))

FULL = Settings(
    name="bench",
    rounds=5,
    n=16_384,
    efficiency=_LISTED,
    growth=(4_096, 8_192, 16_384, 32_768, 65_536),
    growing=GROWING,
    shapes=(*SHAPES, Shape(32, 12, 128)),
    first=(128, 512, 2_048),
    first_zoo=None,
    changing=1_000,
)
"""`make bench`."""

QUICK = Settings(
    name="bench-quick",
    rounds=3,
    n=4_096,
    efficiency=_LISTED,
    growth=(2_048, 4_096, 8_192),
    growing=("window(256)", "dilated(2048, 8)", "strided(√n)", "random(32)"),
    shapes=(Shape(1, 12, 128), Shape(2, 12, 512)),
    first=(128, 512),
    first_zoo=12,
    changing=50,
)
"""`python -m benchmarks --quick`: about a minute, sizes at which overheads still weigh."""
