"""`attnspec.explain_mask`: the shortest spec found whose mask is the given one.

Searched are one graph, then what one leaves out, then unions and intersections of two, then of
three, each alone, under `causal` and inside own blocks; then the same inside documents; then grids.
The nearest of what was examined stands where none is equal. The search is bounded, and always
takes the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations, islice
from math import isqrt
from operator import and_, or_

import numpy as np

from attnspec.analysis.counting.differences import Pairs, only_in
from attnspec.compile.mask_comparison import given_mask
from attnspec.graphs.written_pairs import WrittenPairs
from attnspec.interchange.fitted import Atom, Fit, by_distance
from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import AttnSpecError

LONGEST = 512
"""The longest mask that is examined: every candidate is held against all of its pairs."""

ROWS = 48
"""Queries by which joined graphs are told apart; those that agree there are held against all."""

MOST_HULLS = 3
"""Block hulls that are tried as restrictions at most, smallest first."""

MOST_CUT = 6
"""Graphs around a mask of which another one is cut at most, smallest first."""

MOST_TRIPLES = 60_000
"""Unions of three that are tried at most."""

MOST_OF = 0.8
"""The share of a diagonal, row or column that is taken for all of it where nothing is equal."""


@dataclass(frozen=True)
class Explanation:
    """What a mask [n, n] is, or what comes nearest.

    `spec` has `only_in_spec` and not `only_in_mask`; both are empty where it is `exact`. `inputs`
    are those with which it is meant. Sizes are those of this n: a spec that is exact here may be
    another one at other lengths.
    """

    n: int
    spec: Spec
    inputs: dict[str, np.ndarray]
    only_in_spec: Pairs
    only_in_mask: Pairs
    pairs: int

    @property
    def exact(self) -> bool:
        """Whether the spec has just the pairs of the mask."""
        return not self.only_in_spec and not self.only_in_mask

    def __str__(self) -> str:
        if self.exact:
            text = f"the {self.pairs:,} pairs of the mask at n = {self.n:,}; True = attends"
        else:
            text = (
                f"no short spec was found with just the {self.pairs:,} pairs of the mask; the"
                f" nearest has {self.only_in_spec.count:,} too many, lacks"
                f" {self.only_in_mask.count:,}, at n = {self.n:,}; True = attends"
            )
        for what, side in (("spec", self.only_in_spec), ("mask", self.only_in_mask)):
            if side:
                text += f"\nonly in the {what}: {', '.join(map(str, side.examples))}"
        return f"{text}\n\n{self.spec.source}"


@dataclass(frozen=True, eq=False)
class _Candidate:
    """The lines of a spec behind its inputs, and its mask."""

    lines: tuple[str, ...]
    mask: np.ndarray
    graphs: int
    inputs: tuple[tuple[str, np.ndarray], ...] = ()

    @property
    def rank(self) -> tuple[int, int, str]:
        text = "\n".join(self.lines)
        return self.graphs, len(text), text


@dataclass(frozen=True, eq=False)
class _Restriction:
    """What a whole graph is cut by, as lines before the graph or as an operand of it."""

    lines: tuple[str, ...]
    operand: str
    mask: np.ndarray
    inputs: tuple[tuple[str, np.ndarray], ...] = ()

    @property
    def graphs(self) -> int:
        return bool(self.operand) + bool(self.lines)


def explain_mask(mask: object, *, name: str = "explained") -> Explanation:
    """The shortest spec found whose mask is `mask`, bool [n, n], True = attends; or the nearest.

    Named patterns are fitted to the mask and joined, two or three at a time, under `causal`, own
    blocks, or documents, which become an input. The search is bounded and always takes the same
    way. Raises AttnSpecError for a mask that is not square and boolean, or above n = `LONGEST`.
    """
    shape = np.shape(mask)  # type: ignore[call-overload]
    if len(shape) < 2:
        raise AttnSpecError(f"a mask [n, n] is needed, got {list(shape)}")
    n = int(shape[-1])
    if shape[-2] != n:
        raise AttnSpecError(
            f"a mask [n, n] is needed, got {list(shape)}: no spec with `cross` is looked for; to"
            " compare one that you wrote with this mask, call `spec.compare(mask)`"
        )
    if n > LONGEST:
        raise AttnSpecError(
            f"masks are explained up to n = {LONGEST:,}, got {n:,}: a smaller one of the same rule"
            " will do"
        )
    if any(count != 1 for count in shape[:-2]):
        first = ", ".join("0" for _ in shape[:-2])
        raise AttnSpecError(
            f"one head of one sample is explained at a time, got {list(shape)}:"
            f" pass `mask[{first}]`"
        )
    pairs = np.asarray(given_mask(mask, (n, n), 1)[0])
    shortest = _shortest(pairs)
    lines = [f"attention {name} {{", *(f"    {x}" for x in shortest.lines), "}", ""]
    spec, inputs = parse("\n".join(lines)), dict(shortest.inputs)
    relation, written = spec.relation(n, inputs=inputs or None), WrittenPairs(pairs)
    differ = only_in(relation, written, n), only_in(written, relation, n)
    return Explanation(n, spec, inputs, *differ, int(pairs.sum()))


def _shortest(mask: np.ndarray) -> _Candidate:
    if mask.all():
        return _Candidate(("attend full",), mask, 1)
    if not mask.any():
        return _Candidate(("attend where(false)",), mask, 1)
    nearest = [_Candidate(("attend where(false)",), np.zeros_like(mask), 1)]
    restrictions = list(_restrictions(mask))
    for inputs in (False, True):
        searches = [_Search(mask, one) for one in restrictions if bool(one.inputs) is inputs]
        for count in (1, 2, 3):
            for search in searches:
                candidates = list(search.of(count))
                exact = [one for one in candidates if (one.mask == mask).all()]
                if exact:
                    return min(exact, key=lambda one: one.rank)
                nearest += candidates
            turned = [one for search in searches if count == 1 for one in search.left_out()]
            if turned:
                # the shortest text: `causal` beside it adds no graph
                return min(turned, key=lambda one: one.rank[1:])
    for candidate in _on_grids(mask):
        if (candidate.mask == mask).all():
            return candidate
    nearest += _rough(mask)
    return min(nearest, key=lambda one: (int((one.mask ^ mask).sum()), one.rank))


# --- restrictions ---------------------------------------------------------------------------------


def _restrictions(mask: np.ndarray) -> Iterator[_Restriction]:
    """What the pairs of a mask are all inside of, simplest first."""
    n = len(mask)
    everything, causal, alone = np.ones_like(mask), np.tri(n, dtype=bool), np.eye(n, dtype=bool)
    yield _Restriction((), "", everything)
    if not (mask & ~alone).any():
        yield _Restriction((), "self", alone)
    lines, outer = tuple[str, ...](), everything
    if not (mask & ~causal).any() and n > 1:
        lines, outer = ("causal",), causal
        yield _Restriction(lines, "", outer)
    hulls = [
        _Restriction(lines, atom.text, atom.mask & outer)
        for atom in Fit(mask, everything).around()
        if atom.text.startswith("block(") and not (atom.mask | ~outer).all()
    ]
    yield from sorted(hulls, key=lambda one: int(one.mask.sum()))[:MOST_HULLS]
    labels = _documents(mask)
    if labels is not None:
        same = labels[:, None] == labels[None]
        declared, inputs = ("input document: ids", *lines), (("document", labels),)
        yield _Restriction(declared, "same(document)", same & outer, inputs)


def _documents(mask: np.ndarray) -> np.ndarray | None:
    """The parts of a sequence between which no pair is held, numbered; None where it is one."""
    position = np.arange(len(mask))
    either = mask | mask.T
    farthest = np.where(either, position[None], position[:, None]).max(1)
    ends = np.maximum.accumulate(farthest) == position
    labels = np.concatenate(([0], np.cumsum(ends)[:-1]))
    return labels if labels[-1] > 0 else None


# --- graphs under a restriction -------------------------------------------------------------------


class _Search:
    """The graphs that are fitted to a mask under a restriction."""

    def __init__(self, mask: np.ndarray, restriction: _Restriction) -> None:
        self.mask, self.restriction = mask, restriction
        fit = Fit(mask, restriction.mask)
        self.inside, self.around = fit.inside(), fit.around()

    def of(self, count: int) -> Iterator[_Candidate]:
        """Single graphs, or unions and intersections of so many: those that are equal to the mask,
        and the nearest."""
        if count == 1:
            yield _joined(self.restriction, ())
            for atom in (*self.inside, *self.around):
                yield _joined(self.restriction, (atom,))
            return
        # `causal` is a restriction of its own
        around = [atom for atom in self.around if atom.text != "causal"]
        for op, atoms in (("|", self.inside), ("&", around)):
            yield from _combined(self.mask, self.restriction, op, atoms, count)
        if count == 2:
            yield from self.differences()

    def differences(self) -> Iterator[_Candidate]:
        """One graph without another: those that are equal to the mask."""
        for atom in self.around[::-1][:MOST_CUT]:
            inside = atom.mask & self.restriction.mask
            for cut in Fit(inside & ~self.mask, inside).inside():
                if (inside & ~cut.mask == self.mask).all():
                    whole = Atom(f"{atom.text} - {cut.text}", self.mask)
                    candidate = _joined(self.restriction, (whole,))
                    yield replace(candidate, graphs=candidate.graphs + 1)

    def left_out(self) -> Iterator[_Candidate]:
        """The complements of single graphs that are equal to the mask under the restriction."""
        inside = self.restriction.mask
        fit = Fit(inside & ~self.mask, inside)
        for atom in (*fit.inside(), *fit.around()):
            if (inside & ~atom.mask == self.mask).all():
                yield _joined(self.restriction, (Atom(f"~{atom.text}", self.mask),))


def _combined(
    mask: np.ndarray, restriction: _Restriction, op: str, atoms: Sequence[Atom], count: int
) -> Iterator[_Candidate]:
    """The unions, or intersections, of so many graphs that are equal to the mask, and the best of
    those that are not."""
    looked = np.unique(np.linspace(0, len(mask) - 1, ROWS).astype(int))
    rows = [_bits((atom.mask & restriction.mask)[looked]) for atom in atoms]
    wanted, best = _bits(mask[looked]), None
    for chosen in islice(combinations(range(len(atoms)), count), MOST_TRIPLES):
        total = reduce(or_ if op == "|" else and_, (rows[index] for index in chosen))
        missed = (total ^ wanted).bit_count()
        if missed == 0 or best is None or missed < best[0]:
            best = missed, chosen
            if missed == 0:
                yield _joined(restriction, [atoms[index] for index in chosen], op)
    if best is not None and best[0]:
        yield _joined(restriction, [atoms[index] for index in best[1]], op)


def _bits(mask: np.ndarray) -> int:
    return int.from_bytes(np.packbits(mask).tobytes(), "big")


def _joined(restriction: _Restriction, atoms: Sequence[Atom], op: str = "|") -> _Candidate:
    """Graphs joined under a restriction, which stands alone without any."""
    join, mask = np.logical_or if op == "|" else np.logical_and, restriction.mask
    if atoms:
        mask = mask & join.reduce([atom.mask for atom in atoms])
    # windows and blocks before what stands beside them
    first = ("window", "block", "causal")
    texts = sorted((x.text for x in atoms), key=lambda x: (not x.startswith(first), len(x), x))
    text = f" {op} ".join(texts)
    if restriction.operand:
        inner = f"({text})" if op == "|" and len(texts) > 1 else text
        text = f"{restriction.operand} & {inner}" if texts else restriction.operand
    lines = (*restriction.lines, f"attend {text or 'full'}")
    return _Candidate(lines, mask, len(texts) + restriction.graphs, restriction.inputs)


# --- grids, and what comes near -------------------------------------------------------------------


def _on_grids(mask: np.ndarray) -> Iterator[_Candidate]:
    """Patterns of a grid, for every way to cut n into rows and columns."""
    n = len(mask)
    for height in (h for h in range(2, isqrt(n) ** 2 and n) if n % h == 0 and n // h > 1):
        width = n // height
        cell = np.arange(n)
        rows, columns = (np.abs(x[:, None] - x[None]) for x in (cell // width, cell % width))
        sequence = f"sequence grid({height}, {width})"
        yield _Candidate((sequence, "attend axial"), (rows == 0) | (columns == 0), 1)
        if not mask.any(1).all():
            continue
        reach = [int(np.where(mask, part, 0).max()) for part in (rows, columns)]
        near = f"abs(q.row - k.row) <= {reach[0]} and abs(q.col - k.col) <= {reach[1]}"
        inside = (rows <= reach[0]) & (columns <= reach[1])
        yield _Candidate((sequence, f"attend where({near})"), inside, 1)
        first = mask[0].reshape(height, width)
        # the rows and columns of the box that the first cell reads
        box = int(first.any(1).sum()), int(first.any(0).sum())
        if all(size % 2 for size in box):
            graph = f"neighborhood({box[0]}, {box[1]})"
            spec = parse(f"attention a {{ {sequence} attend {graph} }}")
            yield _Candidate((sequence, f"attend {graph}"), spec.mask(n), 1)


def _rough(mask: np.ndarray) -> Iterator[_Candidate]:
    """Graphs of what most of each diagonal, row and column says, of all pairs and of those that
    are causal."""
    n = len(mask)
    for care in (np.ones_like(mask), np.tri(n, dtype=bool)):
        smooth = _smoothed(mask, care)
        if not smooth.any():
            continue
        for restriction in _restrictions(smooth):
            if restriction.inputs:
                continue
            search = _Search(smooth, restriction)
            for count in (1, 2, 3):
                candidates = list(search.of(count))
                yield from candidates
                if any((one.mask == smooth).all() for one in candidates):
                    break


def _smoothed(mask: np.ndarray, care: np.ndarray) -> np.ndarray:
    """The diagonals, rows and columns of which a mask has most pairs that count."""
    n, position = len(mask), np.arange(len(mask))
    gap = position[:, None] - position[None]
    counted, present = (by_distance(gap, x) for x in (care, mask & care))
    smooth = (present > MOST_OF * counted)[gap + n - 1]
    for axis in (0, 1):
        counted, present = (x.sum(axis, keepdims=True) for x in (care, mask & care))
        smooth |= present > MOST_OF * counted
    return np.asarray(smooth & care)
