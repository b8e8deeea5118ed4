"""Graphs fitted to a mask: patterns whose sizes are read off it.

A mask has full diagonals, full rows and columns, and full blocks; each family of patterns has its
largest member inside the mask, and its smallest member around it. Which pairs count is said by
`care`: what a restriction such as `causal` leaves out is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnspec.text.diagnostics import ranges

MOST_LISTED = 12
"""Runs of positions that a token set is written with at most."""

MOST_STEPS = 12
"""Steps, strides and sizes of blocks of a family that are tried at most."""

NEAR_BLOCKS = 2
"""Blocks before or after the own that a hull of blocks has at most."""

MOST_FOUND = 72
"""Graphs that are joined with one another at most."""


@dataclass(frozen=True, eq=False)
class Atom:
    """A graph as text, and its mask."""

    text: str
    mask: np.ndarray


class Fit:
    """A mask bool [n, n] under a restriction bool [n, n], which holds all of it."""

    def __init__(self, mask: np.ndarray, care: np.ndarray) -> None:
        self.mask, self.care, self.n = mask, care, len(mask)
        self.q, self.k = np.arange(self.n)[:, None], np.arange(self.n)[None]

    @cached_property
    def _diagonals(self) -> tuple[np.ndarray, np.ndarray]:
        """For q - k = 1 - n … n - 1: whether all pairs that count are held, and whether any is."""
        counted, present = (by_distance(self.q - self.k, x) for x in (self.care, self.mask))
        return present == counted, present > 0

    @property
    def touched(self) -> np.ndarray:
        """The distances q - k of which some pair is held."""
        return np.flatnonzero(self._diagonals[1]) - (self.n - 1)

    def inside(self) -> list[Atom]:
        """Patterns whose pairs, as far as they count, are all held: for unions."""
        atoms = [*self._windows(), *self._steps(), *self._tokens(True), *self._blocks(True)]
        atoms += self._columns_by_residue()
        return self._distinct(atoms, lambda atom: not (atom.mask & self.care & ~self.mask).any())

    def around(self) -> list[Atom]:
        """Patterns that hold all pairs of the mask: for intersections."""
        atoms = [*self._hulls(), *self._tokens(False), *self._blocks(False)]
        return self._distinct(atoms, lambda atom: not (self.mask & ~atom.mask).any())

    def _distinct(self, found: Sequence[Atom], fits: Callable[[Atom], bool]) -> list[Atom]:
        """Those that fit, the shortest of each that says the same, most pairs first."""
        kept: dict[bytes, Atom] = {}
        for atom in found:
            if not fits(atom) or not (atom.mask & self.care).any():
                continue
            key = np.packbits(atom.mask & self.care).tobytes()
            if key not in kept or self._rank(atom) < self._rank(kept[key]):
                kept[key] = atom
        every = sorted(
            kept.values(), key=lambda one: (-int((one.mask & self.care).sum()), self._rank(one))
        )
        return every[:MOST_FOUND]

    def _rank(self, atom: Atom) -> tuple[int, int, str]:
        """What says no more than it must comes first, then what is short."""
        return int((atom.mask & ~self.care).sum()), len(atom.text), atom.text

    # --- distances -------------------------------------------------------------------------------

    def _run(self, step: int) -> int:
        """How many steps from 0 on have full diagonals; -1 where 0 has none."""
        full = self._diagonals[0][self.n - 1 :: step]
        return int(np.argmin(np.append(full, False))) - 1

    def _windows(self) -> Iterator[Atom]:
        yield from self._plain()
        before, after = self._run(1), self._run(-1)
        if before >= 0:
            yield self._window(before, after)
            yield self._window(before, 0)
            yield self._window(0, after)
            yield self._window(min(before, after), min(before, after))

    def _window(self, before: int, after: int) -> Atom:
        text = f"before = {before}, after = {after}"
        if before == after:
            text = f"radius = {before}"
        gap = self.q - self.k
        return Atom(f"window({text})", (gap <= before) & (gap >= -after))

    def _plain(self) -> Iterator[Atom]:
        yield Atom("self", self.q == self.k)
        yield Atom("causal", self.k <= self.q)
        yield Atom("transpose(causal)", self.k >= self.q)
        for base in range(2, 9):
            sizes = [0] + [base**e for e in range(self.n.bit_length()) if base**e < self.n]
            yield Atom(
                "powers" if base == 2 else f"powers(base = {base})",
                np.isin(np.abs(self.q - self.k), sizes),
            )

    def _steps(self) -> Iterator[Atom]:
        """Distances that are multiples: to the end, or up to a radius."""
        gap, steps, dilated = np.abs(self.q - self.k), 0, 0
        near = min(self._run(1), self._run(-1))
        for step in range(2, self.n):
            reach = min(self._run(step), self._run(-step))
            to_end = reach >= (self.n - 1) // step
            if to_end and steps < MOST_STEPS:
                steps += 1
                yield Atom(f"residue(step = {step})", gap % step == 0)
                if near >= step - 1:
                    yield Atom(f"strided(stride = {step})", (gap < step) | (gap % step == 0))
            elif reach >= 2 and reach * step > near and dilated < MOST_STEPS:
                dilated += 1
                yield self._dilated(reach * step, step)

    def _dilated(self, radius: int, step: int) -> Atom:
        gap = np.abs(self.q - self.k)
        text = f"dilated(radius = {radius}, step = {step})"
        return Atom(text, (gap <= radius) & (gap % step == 0))

    def _hulls(self) -> Iterator[Atom]:
        """The window and the steps around all pairs."""
        yield from self._plain()
        at = self.touched
        if len(at) == 0:
            return
        before, after = max(0, int(at.max())), max(0, -int(at.min()))
        yield self._window(before, after)
        yield self._window(max(before, after), max(before, after))
        gap, step = np.abs(self.q - self.k), int(np.gcd.reduce(np.abs(at)))
        if step > 1:
            yield Atom(f"residue(step = {step})", gap % step == 0)
            yield self._dilated(max(before, after), step)

    # --- positions -------------------------------------------------------------------------------

    def _tokens(self, inside: bool) -> Iterator[Atom]:
        """Rows and columns: those that are full, or all that are touched."""
        every = {}
        for name, axis in (("columns", 0), ("rows", 1)):
            counted, present = self.care.sum(axis), self.mask.sum(axis)
            every[name] = (present == counted) & (counted > 0) if inside else present > 0
        if inside:
            every["global"] = every["columns"] & every["rows"]
        for name, members in every.items():
            for text, chosen in self._sets(members):
                present = {
                    "columns": np.broadcast_to(chosen[None], self.mask.shape),
                    "rows": np.broadcast_to(chosen[:, None], self.mask.shape),
                    "global": chosen[None] | chosen[:, None],
                }
                yield Atom(f"{name}({text})", present[name])

    def _sets(self, members: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Sets of positions inside `members`: all of them, the first and the last run of them, what
        is left without these, and every step of them."""
        at, n = np.flatnonzero(members), self.n
        if len(at) in (0, n):
            return
        position = np.arange(n)
        leading = int(np.argmin(members))
        trailing = int(np.argmin(members[::-1]))
        for count, text, chosen in (
            (leading, f"first({leading})", position < leading),
            (trailing, f"last({trailing})", position >= n - trailing),
        ):
            if count:
                yield text, chosen
        if leading and trailing:
            ends = (position < leading) | (position >= n - trailing)
            yield f"first({leading}) | last({trailing})", ends
        for chosen in (members, members & (position < n - trailing)):
            runs = ranges(np.flatnonzero(chosen).tolist())
            if runs and runs.count(",") < MOST_LISTED:
                yield f"positions({runs})", chosen
        for step in range(2, n // 2):
            offset = next((each for each in range(step) if members[each::step].all()), None)
            if offset is not None:
                chosen = (position >= offset) & ((position - offset) % step == 0)
                tail = f", offset = {offset}" if offset else ""
                yield f"every({step}{tail})", chosen
                break

    def _columns_by_residue(self) -> Iterator[Atom]:
        """The last cells of every stride."""
        counted, present = self.care.sum(0), self.mask.sum(0)
        members, position = present == counted, np.arange(self.n)
        for stride in range(2, self.n // 2 + 1):
            by_residue = [bool(members[r::stride].all()) for r in range(stride)]
            cells = stride if all(by_residue) else int(np.argmin(by_residue[::-1]))
            if 0 < cells < stride:
                chosen = position % stride >= stride - cells
                sizes, columns = f"stride = {stride}, cells = {cells}", chosen[None]
                yield Atom(f"summary({sizes})", np.broadcast_to(columns, self.mask.shape))
                same_block = self.q // stride == self.k // stride
                yield Atom(f"fixed({sizes})", same_block | columns)
                return

    # --- blocks ----------------------------------------------------------------------------------

    def _blocks(self, inside: bool) -> Iterator[Atom]:
        """Block windows, largest inside or smallest around."""
        sizes = 0
        for size in range(2, self.n):
            if sizes >= MOST_STEPS:
                return
            if not self._may_have_blocks(size, inside):
                continue
            q, k = self.q // size, self.k // size
            reach = self._block_reach(q - k, inside)
            if reach is None:
                continue
            before, after = reach
            near = (q - k <= before) & (k - q <= after)
            # a window has blocks of every size inside; those of a mask move with it
            moved = np.zeros_like(near)
            moved[1:, 1:] = near[:-1, :-1]
            if inside and not (moved[1:, 1:] & self.care[1:, 1:] & ~self.mask[1:, 1:]).any():
                continue
            sizes += 1
            tail = f", before = {before}" if before else ""
            tail += f", after = {after}" if after else ""
            yield Atom(f"block(size = {size}{tail})", near)

    def _may_have_blocks(self, size: int, inside: bool) -> bool:
        """Whether blocks of a size are worth a look: inside, whether the corners of the first are
        held, around, whether few blocks reach as far as the mask does."""
        if inside:
            corners = (size - 1, 0), (0, size - 1)
            return all(self.mask[at] or not self.care[at] for at in corners)
        at = self.touched
        return len(at) > 0 and int(np.abs(at).max()) < NEAR_BLOCKS * size

    def _block_reach(self, gap: np.ndarray, inside: bool) -> tuple[int, int] | None:
        """How many blocks before and after the own are held, or touched; None where the own is
        not held, or nothing is left out."""
        most = int(gap.max())
        counted, present = (by_distance(gap, x) for x in (self.care, self.mask))
        if inside:
            full = present == counted
            if not full[most]:
                return None
            before = int(np.argmin(np.append(full[most:], False))) - 1
            after = int(np.argmin(np.append(full[most::-1], False))) - 1
            # what does not count is free, and not worth a word
            after = after if counted[:most].any() else 0
            return before, after
        at = np.flatnonzero(present) - most
        if len(at) == 0:
            return None
        before, after = max(0, int(at.max())), max(0, -int(at.min()))
        return None if before >= most and after >= most else (before, after)


def by_distance(gap: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """How many pairs of a mask there are at each of the distances, from the least to the most."""
    most = int(gap.max())
    return np.bincount((gap + most)[mask], minlength=2 * most + 1)
