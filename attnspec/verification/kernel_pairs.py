"""Which pairs a kernel holds, read out of what it is about to execute.

No layout is trusted: positions are sent through the very gathers, views and masks that queries and
keys go through, so a strip that reads a wrong row, or a mask with a wrong bit, shows up as a wrong
pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attnspec.backends.tables.composed import Piece
from attnspec.limits import LIMITS
from attnspec.lower.work import Call

if TYPE_CHECKING:
    from attnspec.lower.work import Kernel

SIZE = 64
"""The size of the heads for which steps are cut into pieces."""

Pairs = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Independent blocks of equal shape.

    `queries` are positions, int [blocks, h], -1 where the result is dropped. For blocks
    low <= b < high, `keys(low, high)` are positions, int [high - low, w], and
    `mask(low, high)` is bool [1 or high - low, h, w], or None where every pair is held; `shared`
    says that all blocks have one mask. A tile is that many queries and keys.
    """

    what: str
    queries: np.ndarray
    width: int
    keys: Callable[[int, int], np.ndarray]
    mask: Callable[[int, int], np.ndarray | None]
    shared: bool
    tile: tuple[int, int]

    def chunks(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Ranges of blocks low <= b < high with about `LIMITS.pairs_at_once` pairs each."""
        step = max(1, LIMITS.pairs_at_once // max(1, self.queries.shape[1] * self.width))
        for first in range(low, high, step):
            yield first, min(first + step, high)

    def pairs(self, low: int, high: int, wanted: np.ndarray) -> Pairs:
        """The pairs that blocks low <= b < high hold of the queries that are wanted, bool
        [high - low, h]; a pair that is held twice stands twice."""
        queries, keys, mask = self.queries[low:high], self.keys(low, high), self.mask(low, high)
        if high - low == 1:
            # one block may be tall, and few of its queries wanted
            at = np.flatnonzero(wanted[0])
            queries, wanted = queries[:, at], wanted[:, at]
            mask = None if mask is None else mask[:, at]
        held = np.broadcast_to(wanted[:, :, None], (*wanted.shape, keys.shape[1]))
        if mask is not None:
            held = held & mask
        block, row, column = np.nonzero(held)
        return queries[block, row].astype(np.int64), keys[block, column].astype(np.int64)

    def counts(self, into: np.ndarray) -> None:
        """Add the number of keys that are held for each query to `into` [n]."""
        for low, high in (
            [(0, len(self.queries))] if self.shared else self.chunks(0, len(self.queries))
        ):
            queries, mask = self.queries[low:high], self.mask(low, high)
            count = np.array(self.width) if mask is None else mask.sum(-1)
            real = queries >= 0
            np.add.at(into, queries[real], np.broadcast_to(count, queries.shape)[real])


@dataclass(frozen=True, eq=False)
class Layout:
    """One list of blocks that is to hold each pair of the graph once."""

    what: str
    unit: str
    parts: tuple[Blocks, ...]


def layouts_of(
    kernel: Kernel, n_q: int, n_k: int, data: Mapping[str, torch.Tensor], place: int = 0
) -> tuple[Layout, ...] | None:
    """What a kernel executes on the CPU for the head at a place among its own, with the inputs of
    the first sample of `data`.

    None for one that has no layout: the definition itself, which evaluates every pair.
    """
    # a standalone module brings classes of its own, so that they are known by their names alone
    name = type(kernel).__name__
    found: Any = kernel
    if hasattr(found, "kernel_of"):
        found = found.kernel_of(data, 0)
        name = type(found).__name__
    if name in ("GraphBeside", "WindowBeside"):
        # of a hybrid, the pairs that it computes exactly
        found = found.exact
        name = type(found).__name__
    if name in ("SteppedKernel", "HybridKernel", "JoinedSteps"):
        # of a hybrid, likewise
        heads = sum(count for _, count in found.each) if name == "JoinedSteps" else 1
        at_k = torch.full((heads, n_k), -1)
        # places that are no rows read 0, so that positions of queries count from 1 here
        at_q = torch.zeros(heads, n_q, dtype=torch.int64)
        own = place if heads > 1 else 0
        at_k[own] = torch.arange(n_k)
        at_q[own] = torch.arange(n_k - n_q, n_k) + 1
        sides = at_q.view(1, -1), at_k.view(1, -1)
        return tuple(
            Layout(what, "tile", tuple(_steps(found.attention, *sides, back)))
            for what, back in (("its tiles", False), ("its tiles on the way back", True))
        )
    if name == "ComposedTables":
        return (Layout("its tiles", "tile", tuple(_composed(found, n_q, n_k))),)
    if name in ("TritonKernel", "InputKernel"):
        steps, labels = found.tables_of(data, 1)
        return tuple(
            Layout(what, "tile", tuple(_listed(steps, labels, n_k - n_q, back)))
            for what, back in (("its lists", False), ("its lists on the way back", True))
        )
    if name == "ScatteredKernel":
        return _edges(found, n_q, n_k)
    if name == "TorchCallKernel":
        read = _call(found, n_q, n_k, data, place)
        return (Layout("the arguments of its call", "pair", (read,)),)
    if name == "RowsKernel":
        return (Layout("its rows", "row", (_rows(found, n_q, n_k, data),)),)
    return None


def _steps(attention: Any, at_q: torch.Tensor, at_k: torch.Tensor, back: bool) -> Iterator[Blocks]:
    """The pieces that are computed, forward or backward, where positions, of queries from 1, are in
    place of their rows."""
    for number, step in enumerate(attention.steps, 1):
        order = step.keys_order(back)
        # what is put in order stands in a buffer that the next one uses
        rows = at_q if step.q_order is None else step.q_order.take(at_q, "positions", True).clone()
        keys = at_k if order is None else order.take(at_k, "positions").clone()
        for piece in step.pieces(1, SIZE, back, False):
            found = piece.q.read(rows, piece.to, "positions", blank=True)
            bias, _ = piece.masks(None)
            yield Blocks(
                f"step {number}",
                piece.to.back(found)[0].numpy() - 1,
                piece.k.height,
                partial(_piece_keys, piece, keys),
                partial(_piece_mask, bias),
                bias is None or len(bias) == 1,
                (1, 1),
            )


def _piece_keys(piece: Any, keys: torch.Tensor, low: int, high: int) -> np.ndarray:
    found: np.ndarray = piece.to.back(piece.k.read(keys, piece.to, "positions"))[0].numpy()
    return found[low:high].copy()


def _piece_mask(bias: torch.Tensor | None, low: int, high: int) -> np.ndarray | None:
    if bias is None:
        return None
    return np.asarray((bias if len(bias) == 1 else bias[low:high]).numpy() == 0)


def _composed(kernel: Any, n_q: int, n_k: int) -> Iterator[Blocks]:
    at_k = torch.arange(n_k).view(1, 1, -1, 1)
    for number, step in enumerate(kernel.steps, 1):
        place = step.place.numpy()
        rows = np.full(sum(batch.blocks * batch.height for batch in step.batches) + 1, -1)
        rows[place] = np.arange(n_k - n_q, n_k)
        low = 0
        for batch in step.batches:
            high = low + batch.blocks * batch.height
            yield Blocks(
                f"step {number}",
                rows[low:high].reshape(batch.blocks, -1),
                batch.width,
                partial(_composed_keys, batch, at_k),
                partial(_composed_mask, batch),
                batch.tiled is None and batch.real is None,
                (1, 1),
            )
            low = high


def _composed_keys(batch: Any, at: torch.Tensor, low: int, high: int) -> np.ndarray:
    found: np.ndarray = Piece(batch, low, high, 0, batch.height).of_keys(at)[0, 0, :, :, 0].numpy()
    return found


def _composed_mask(batch: Any, low: int, high: int) -> np.ndarray | None:
    mask = Piece(batch, low, high, 0, batch.height).mask
    return None if mask is None else mask.reshape(-1, *mask.shape[-2:]).numpy()


def _listed(
    steps: Sequence[Any], labels: torch.Tensor | None, first: int, back: bool
) -> Iterator[Blocks]:
    """The entries of lists, each a block, whose programs are those of queries, or of keys, of the
    first sample; `labels` [B, L, n] are those that a pair has in common."""
    for number, step in enumerate(steps, 1):
        lists = step.columns if back else step.rows
        programs = lists.programs[0] if lists.programs.dim() == 3 else lists.programs
        tile, low, middle, high, _ = programs.numpy().astype(np.int64).T
        own, count = np.repeat(tile, high - low), high - low
        place = np.arange(len(own)) - np.repeat(np.cumsum(count) - count - low, count)
        other, whole = lists.tiles.numpy()[place], place < np.repeat(middle, count)
        q_tiles, k_tiles = (other, own) if back else (own, other)
        queries, keys = _tile_rows(step.q)[q_tiles], _tile_rows(step.k)[k_tiles]
        bits = step.words.numpy()[..., None] >> np.arange(32) & 1 > 0
        masks = bits.reshape(*bits.shape[:2], -1)[:, :, : step.k.size]
        numbers = np.where(whole, -1, lists.kinds.numpy()[place])
        yield Blocks(
            f"step {number}",
            np.where(queries >= 0, queries + first, -1),
            step.k.size,
            partial(_some, keys),
            partial(_listed_mask, (queries, keys), masks, numbers, _labels_of(labels, first)),
            False,
            (step.q.size, step.k.size),
        )


def _tile_rows(side: Any) -> np.ndarray:
    """The rows of every tile, int64 [tiles, size], -1 for none."""
    if not side.step:
        return np.asarray(side.listed.numpy().astype(np.int64).reshape(-1, side.size))
    rows = side.firsts.numpy().astype(np.int64)[:, None] + side.step * np.arange(side.size)
    return np.where(rows < side.ends.numpy()[:, None], rows, -1)


def _some(rows: np.ndarray, low: int, high: int) -> np.ndarray:
    return rows[low:high]


def _labels_of(labels: torch.Tensor | None, first: int) -> tuple[np.ndarray, np.ndarray]:
    """The labels of the rows of queries and of keys of the first sample, [L, rows]."""
    own = np.zeros((0, 1), np.int64) if labels is None else labels[0].numpy()
    return own[:, first:], own


def _listed_mask(
    rows: tuple[np.ndarray, np.ndarray],
    masks: np.ndarray,
    numbers: np.ndarray,
    labels: tuple[np.ndarray, np.ndarray],
    low: int,
    high: int,
) -> np.ndarray:
    part = slice(low, high)
    queries, keys = (x[part] for x in rows)
    held = (queries >= 0)[:, :, None] & (keys >= 0)[:, None]
    for of_q, of_k in zip(*labels, strict=True):
        held &= of_q[queries][:, :, None] == of_k[keys][:, None]
    return np.asarray(held & (masks[numbers[part]] | (numbers[part] < 0)[:, None, None]))


def _edges(kernel: Any, n_q: int, n_k: int) -> tuple[Layout, ...]:
    """Every place is a block of one pair: forward row by row, backward also key by key."""
    products = kernel.products
    rows = torch.arange(len(products.offsets) - 1) if products.order is None else products.order
    rows = (rows + (n_k - n_q)).int()
    queries = rows.repeat_interleave(products.offsets.diff().long()).numpy()
    real = np.ones(len(queries), bool)
    for group in kernel.groups:
        mask = group.mask(None)
        if mask is not None:
            real[group.places] = mask.numpy().ravel()
    starts, by_key, places = products.layout.by_key
    keys = np.repeat(np.arange(n_k, dtype=np.int32), np.diff(starts))
    return (
        Layout("its edges", "place", (_single("row", queries, products.keys.numpy(), real),)),
        Layout(
            "its edges by key",
            "place",
            (_single("key", by_key + np.int32(n_k - n_q), keys, real[places]),),
        ),
    )


def _call(kernel: Any, n_q: int, n_k: int, data: Mapping[str, torch.Tensor], place: int) -> Blocks:
    (part,) = kernel._parts(torch.zeros(1, 1, n_q, 1), Call(data=data))
    held = None
    if part.causal:
        held = np.tri(n_k, dtype=bool)[None]
    elif part.bias is not None:
        # heads of one graph share a mask, or differ in what `alibi` adds
        added = part.bias.added[0]
        own = added[place : place + 1] if len(added) > 1 else added
        held = np.broadcast_to((own > -torch.inf).numpy(), (1, n_q, n_k))
    return Blocks(
        "the call",
        np.arange(n_k - n_q, n_k)[None],
        n_k,
        lambda low, high: np.arange(n_k)[None],
        lambda low, high: held,
        True,
        (1, 1),
    )


def _rows(kernel: Any, n_q: int, n_k: int, data: Mapping[str, torch.Tensor]) -> Blocks:
    keys: np.ndarray = kernel._read(torch.arange(n_k)[None], 1).numpy()
    held = kernel.mask(Call(data=data))
    mask = None if held is None else np.broadcast_to(held[:, 0].numpy(), (1, n_q, keys.shape[1]))
    return Blocks(
        "the last queries",
        np.arange(n_k - n_q, n_k)[None],
        keys.shape[1],
        lambda low, high: keys,
        lambda low, high: mask,
        True,
        (1, 1),
    )


def _single(what: str, queries: np.ndarray, keys: np.ndarray, real: np.ndarray) -> Blocks:
    def mask(low: int, high: int) -> np.ndarray | None:
        return real[low:high, None, None]

    return Blocks(
        f"the edges {what} by {what}",
        queries[:, None],
        1,
        lambda low, high: keys[low:high, None],
        mask,
        False,
        (1, 1),
    )
