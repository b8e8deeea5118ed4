"""Graphs fitted to a mask, held against every member of their families."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

import attnspec
from attnspec.interchange.fitted import MOST_STEPS, NEAR_BLOCKS, Fit

N = 9

PLAIN = ("self", "causal", "transpose(causal)", *(f"powers(base = {b})" for b in range(2, 9)))
WINDOWS = tuple(f"window(before = {b}, after = {a})" for b in range(N) for a in range(N))
RESIDUES = tuple(f"residue(step = {s})" for s in range(2, N))
STRIDED = tuple(f"strided(stride = {s})" for s in range(2, N))
DILATED = [
    tuple(f"dilated(radius = {t * s}, step = {s})" for t in range(2, N) if t * s < N)
    for s in range(2, N // 2 + 1)
]
BLOCKS = {
    s: tuple(
        f"block(size = {s}, before = {b}, after = {a})"
        for b in range(-(-N // s))
        for a in range(-(-N // s))
    )
    for s in range(2, N)
}
SETS = (
    tuple(f"first({i})" for i in range(1, N)),
    tuple(f"last({i})" for i in range(1, N)),
    tuple(f"first({i}) | last({j})" for i in range(1, N) for j in range(1, N - i)),
)
EVERY = tuple(f"every({s}, offset = {o})" for s in range(2, N // 2) for o in range(s))
LAST_CELLS = tuple(
    f"(stride = {s}, cells = {c})" for s in range(2, N // 2 + 1) for c in range(s - 1, 0, -1)
)
MENU = (
    *(*PLAIN, *WINDOWS, *RESIDUES, *STRIDED, *(text for family in DILATED for text in family)),
    *(f"{kind}({text})" for kind in ("columns", "rows", "global") for text in sum(SETS, EVERY)),
    *(f"{kind}{sizes}" for kind in ("summary", "fixed") for sizes in LAST_CELLS),
)
SMALL = tuple(text for size in range(2, 6) for text in BLOCKS[size])
CARES = ("full", "causal", "causal", "block(size = 5)", "columns(first(4))", "rows(last(7))")


@cache
def mask_of(text: str) -> np.ndarray:
    return attnspec.parse(f"attention a {{ attend {text} }}").mask(N)


@cache
def masks_of(texts: tuple[str, ...]) -> np.ndarray:
    """The masks of a family, bool [members, n, n]."""
    return np.stack([mask_of(text) for text in texts])


def tokens_of(text: str) -> np.ndarray:
    """The positions of a token set, bool [n]."""
    return np.asarray(mask_of(f"columns({text})")[0])


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A mask that a few patterns make, some with a pair too many or too few, and what counts."""
    draw = random.Random(seed)
    care = mask_of(draw.choice(CARES))
    parts = [mask_of(draw.choice(draw.choice((MENU, SMALL)))) for _ in range(draw.randint(1, 3))]
    join = np.logical_or if draw.random() < 0.7 else np.logical_and
    mask = join.reduce(parts) & care
    if draw.random() < 0.3:
        q, k = draw.choice(np.argwhere(care).tolist())
        mask[q, k] ^= True
    return mask, care


def largest(texts: Sequence[str], mask: np.ndarray, care: np.ndarray) -> list[str]:
    """The members of a family whose pairs, as far as they count, are held, and are some; without
    those that are part of another one."""
    held = masks_of(tuple(texts)) & care
    inside = np.flatnonzero(held.any((1, 2)) & ~(held & ~mask).any((1, 2))).tolist()
    return [
        texts[at]
        for at in inside
        if not any((held[at] <= held[x]).all() and (held[at] != held[x]).any() for x in inside)
    ]


def smallest(texts: Sequence[str], mask: np.ndarray) -> list[str]:
    """The members of a family that hold all of a mask, without those that another is part of."""
    held = masks_of(tuple(texts))
    around = np.flatnonzero(~(mask & ~held).any((1, 2))).tolist()
    return [
        texts[at]
        for at in around
        if not any((held[x] <= held[at]).all() and (held[x] != held[at]).any() for x in around)
    ]


def of_tokens(mask: np.ndarray, care: np.ndarray) -> Iterator[str]:
    """Full rows and columns by their largest sets of each kind, of those in which a pair counts."""
    full = {
        name: care.any(axis) & (mask == care).all(axis)
        for name, axis in (("columns", 0), ("rows", 1))
    }
    full["global"] = full["columns"] & full["rows"]
    for name, members in full.items():
        if members.any():
            yield f"{name}(positions({', '.join(map(str, np.flatnonzero(members)))}))"
            rest = np.flatnonzero(members & (np.arange(N) < N - int(np.argmin(members[::-1]))))
            if len(rest):
                yield f"{name}(positions({', '.join(map(str, rest))}))"
        for sets in SETS:
            within = [text for text in sets if not (tokens_of(text) & ~members).any()]
            yield from (f"{name}({text})" for text in within[-1:])
        within = [text for text in EVERY if not (tokens_of(text) & ~members).any()]
        yield from (f"{name}({text})" for text in within[:1])


def moved(mask: np.ndarray) -> np.ndarray:
    """The pairs one position on."""
    after = np.zeros_like(mask)
    after[1:, 1:] = mask[:-1, :-1]
    return after


def test_the_largest_member_of_each_family_is_inside() -> None:
    for seed in range(70):
        mask, care = drawn(seed)
        if (mask == care).all():
            continue
        found = Fit(mask, care).inside()
        said = {(one.mask & care).tobytes(): one for one in found}
        assert len(said) == len(found)
        wanted = [text for text in (*PLAIN, *STRIDED) if largest([text], mask, care)]
        wanted += largest(WINDOWS, mask, care) + largest(RESIDUES, mask, care)
        windows = [one.mask for one in found if one.text.startswith("window")]
        for family in DILATED:
            for text in largest(family, mask, care):
                if not any((mask_of(text) & care <= window).all() for window in windows):
                    wanted.append(text)
        for family in BLOCKS.values():
            own = largest(family, mask, care)
            wanted += [text for text in own if (moved(mask_of(text)) & care & ~mask).any()]
        cells = [text for text in LAST_CELLS if largest([f"summary{text}"], mask, care)][:1]
        wanted += [f"summary{text}" for text in cells]
        wanted += [f"fixed{text}" for text in cells if largest([f"fixed{text}"], mask, care)]
        for text in wanted:
            assert (mask_of(text) & care).tobytes() in said, text
        for text in of_tokens(mask, care):
            one = said[(mask_of(text) & care).tobytes()]
            assert (one.mask & ~care).sum() <= (mask_of(text) & ~care).sum(), text


def test_the_smallest_member_of_each_family_is_around() -> None:
    for seed in range(70):
        mask, care = drawn(seed)
        if not mask.any():
            continue
        said = {(one.mask & care).tobytes() for one in Fit(mask, care).around()}
        wanted = [text for text in PLAIN if smallest([text], mask)]
        dilated = tuple(text for family in DILATED for text in family)
        farthest = max(abs(q - k) for q, k in np.argwhere(mask))
        # every step is one around `self`
        for family in (WINDOWS, RESIDUES, dilated) if farthest else (WINDOWS,):
            wanted += smallest(family, mask)
        for size, family in BLOCKS.items():
            if farthest < NEAR_BLOCKS * size:
                wanted += [text for text in smallest(family, mask) if not mask_of(text).all()]
        for name, axis in (("columns", 0), ("rows", 1)):
            members = np.flatnonzero(mask.any(axis))
            if len(members) < N:
                wanted.append(f"{name}(positions({', '.join(map(str, members))}))")
        for text in wanted:
            assert (mask_of(text) & care).tobytes() in said, text


def test_what_is_found_is_what_its_text_says() -> None:
    for seed in range(70):
        mask, care = drawn(seed)
        fit = Fit(mask, care)
        inside, around = fit.inside(), fit.around()
        assert all(not (one.mask & care & ~mask).any() for one in inside)
        assert all(not (mask & ~one.mask).any() for one in around)
        for found in (inside, around):
            pairs = [int((one.mask & care).sum()) for one in found]
            assert pairs == sorted(pairs, reverse=True)
            assert 0 not in pairs
            for one in found:
                assert (mask_of(one.text) == one.mask).all(), one.text
                assert "before = 0, after = 0" not in one.text


def test_so_many_steps_and_blocks_are_tried() -> None:
    held = np.ones((40, 40), bool)
    found = [one.text.partition("(")[0] for one in Fit(held, held).inside()]
    assert found.count("residue") == found.count("strided") == MOST_STEPS
    sizes = [one.text for one in Fit(np.eye(40, dtype=bool), held).around()]
    assert sizes.count("self") == 1
    assert len([text for text in sizes if text.startswith("block(")]) == MOST_STEPS
