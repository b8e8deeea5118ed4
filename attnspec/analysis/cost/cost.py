"""What one layer costs in operations, traffic and memory, by the plan that is chosen for it.

For heads of size d, numbers of `element` bytes. A pair costs 4 d operations forward:
2 d for its score, 2 d for its value; softmax, masks and orders are not counted, as in torch's own
counter. Useful are the pairs of the graph, executed all pairs of the tiles that are touched.
Backward without recomputation costs 8 d, in flash kernels, which compute scores again, 10 d.
Mechanisms cost the products of their formulas. Figures are those of the most expensive layer, all
of its heads and all samples of a shape; a spec without `heads` counts as many as the shape says.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from attnspec.analysis.counting.degrees import edges_of, most_keys
from attnspec.analysis.quality import Quality
from attnspec.backends.factored.costs import Products, products_of
from attnspec.backends.one_block.backend import TorchCall
from attnspec.backends.one_block.row_keys import Form, form_of, row_keys
from attnspec.backends.planner import AUTO, TABLES, choose
from attnspec.graphs.stack import Stack, TooMuch, patterns_in, require_supported
from attnspec.ir.program import Crossing, Program
from attnspec.layout.orders import NATURAL
from attnspec.layout.steps import work_bands
from attnspec.layout.tiling import Tiling, survey
from attnspec.limits import LIMITS
from attnspec.lower.costs import dense_seconds
from attnspec.lower.lower import layers_of, require_built
from attnspec.lower.mechanism_sizes import longest_of
from attnspec.lower.work import ONE, BackendError, Shape, Work, graph_of
from attnspec.text.diagnostics import AttnSpecError

ELEMENT = 4
"""Bytes of a number where none are given: float32."""


class NotBuilt(AttnSpecError):
    """A cost that is not known: nothing runs this, or what runs it does not say."""


@dataclass(frozen=True)
class StepCost:
    """One group of heads of some layers that compute alike; all figures are for the whole group and
    all samples.

    `pairs` are the useful ones of one head, None where they are known at run time alone, and of
    mechanisms, `executed` those whose exact weights are computed for one head. `memory` is what the
    step takes besides q, k, v and the output, in bytes. `quality` is that of `executed`: a bound
    where some tiles may turn out to hold no pair, or the inputs of a call decide, an estimate where
    tiles were counted from a sample.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    backend: str
    pairs: int | None
    executed: int
    flops: int
    useful_flops: int | None
    backward_flops: int
    bytes: int
    memory: int
    quality: Quality


@dataclass(frozen=True)
class LayerCost:
    """What the most expensive layer costs, forward unless said; memory is that at one time.

    Operations are those of the tiles that hold a pair. Query tiles at the ends of a sequence, which
    are computed with their neighbours, may take up to 30 % more.

    `peak_memory` holds q, k, v and the output of all heads, and the temporaries of the step that
    needs most.
    """

    flops: int
    useful_flops: int | None
    backward_flops: int
    bytes: int
    peak_memory: int

    @property
    def intensity(self) -> float:
        """Operations for each byte moved."""
        return self.flops / self.bytes if self.bytes else 0.0


def steps_of(
    stack: Stack, n: int, shape: Shape = ONE, element: int = ELEMENT
) -> tuple[StepCost, ...]:
    """The steps chosen at n on the CPU, of the layers of a stack; raises NotBuilt, TooMuch, or as
    `Spec.plan` does."""
    require_built(stack.program)
    require_supported(n)
    program = stack.program
    longest = longest_of(program)
    if longest is not None and n > longest:
        raise NotBuilt(f"above n = {longest:,}, its `max_length`, the mechanism cannot compute")
    heads = shape.heads_of(program)
    groups = layers_of(program, heads, n, stack.layers) if n else {}
    return tuple(
        _step(stack, work, tuple(layers), mine, shape, element)
        for (work, mine), layers in groups.items()
    )


def layer_cost(
    stack: Stack, n: int, steps: tuple[StepCost, ...], shape: Shape = ONE, element: int = ELEMENT
) -> LayerCost:
    """The cost of the layer that costs most, by each figure, from the steps that were found."""
    heads = shape.batch * shape.heads_of(stack.program)
    layers = [[s for s in steps if layer in s.layers] for layer in range(stack.program.layer_count)]
    sides = stack.program.crossing or Crossing(n, n)
    # the outputs of several groups of heads are put together
    of_queries = 3 if any(len(layer) > 1 for layer in layers) else 2
    tensors = heads * (of_queries * sides.queries + 2 * sides.keys) * shape.head_dim * element
    flops, useful, backward, moved = (
        max(sum(getattr(s, name) or 0 for s in layer) for layer in layers)
        for name in ("flops", "useful_flops", "backward_flops", "bytes")
    )
    return LayerCost(
        flops=flops,
        useful_flops=None if None in [s.useful_flops for s in steps] else useful,
        backward_flops=backward,
        bytes=moved,
        peak_memory=tensors + max((s.memory for s in steps), default=0),
    )


# --- one step -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Amounts:
    """For one head: pairs, numbers read and written, numbers held; `shared` bytes once for all
    heads; whether a flash kernel runs it, and how well the number of pairs is known."""

    executed: int
    moved: int
    held: int
    shared: int
    flash: bool
    quality: Quality


def _step(
    stack: Stack,
    work: Work,
    layers: tuple[int, ...],
    heads: tuple[int, ...],
    shape: Shape,
    element: int,
) -> StepCost:
    size, count, pairs = shape.head_dim, shape.batch * len(heads), None
    backend, graph, kernel = _amounts(replace(work, copies=len(heads)), size, AUTO, shape.batch)
    if work.mechanism is None:
        pairs = _useful(stack, work, layers[0], heads)
    flops, backward = _operations(graph, kernel, size)
    whole = graph.quality == "bound" and pairs == graph.executed
    return StepCost(
        layers=layers,
        heads=heads,
        backend=backend,
        pairs=pairs,
        executed=graph.executed,
        flops=flops * count,
        useful_flops=None if pairs is None else 4 * size * pairs * count,
        backward_flops=backward * count,
        bytes=element * (graph.moved + kernel.moved) * count + graph.shared,
        memory=element * max(graph.held, kernel.held) + graph.shared,
        quality="exact" if whole else graph.quality,
    )


def operations_of(work: Work, size: int, backend: str, batch: int) -> tuple[int, int]:
    """The operations of so many samples of all copies of a work on the CPU, forward and backward,
    with heads of a size; NotBuilt where they are not known."""
    _, graph, kernel = _amounts(work, size, backend, batch)
    forward, backward = _operations(graph, kernel, size)
    return forward * work.copies * batch, backward * work.copies * batch


FORWARD, BACKWARD, AGAIN = 4, 8, 10
"""Operations of a pair for each number of a head: of its score and its value, of their gradients,
and of these where the score is computed again."""


def passes_of(work: Work, backend: str, size: int) -> float:
    """How many times the operations of the forward both passes have, for heads of a size; of a
    backend whose operations are not known, those of a kernel that computes its scores again."""
    try:
        forward, backward = operations_of(work, size, backend, 1)
    except NotBuilt:
        forward, backward = FORWARD, AGAIN
    return 1 + backward / forward if forward else 1.0


def _operations(graph: _Amounts, own: Products, size: int) -> tuple[int, int]:
    """Those of one head."""
    backward = (AGAIN if graph.flash else BACKWARD) * size * graph.executed + own.backward_flops
    return FORWARD * size * graph.executed + own.flops, backward


def _amounts(work: Work, size: int, backend: str, batch: int) -> tuple[str, _Amounts, Products]:
    """What runs all copies of a work, and the amounts of its graph and of its mechanism."""
    copies = work.copies * batch
    try:
        name = choose(work, "cpu", backend).name
    except BackendError as error:
        raise NotBuilt(str(error)) from None
    if work.mechanism is not None:
        none = _Amounts(0, 0, 0, 0, True, "exact")
        graph = _bands(graph_of(work), copies, size) if work.hybrid else none
        return name, graph, products_of(work, copies, size)
    if name not in _AMOUNTS and not work.decided:
        raise NotBuilt(f"the backend {name} does not say how many pairs it computes")
    return name, _AMOUNTS.get(name, _decided)(work, copies, size), Products(0, 0, 0, 0)


def _useful(stack: Stack, work: Work, layer: int, heads: tuple[int, ...]) -> int | None:
    counts = [stack.known[layer, head] for head in heads if (layer, head) in stack.known]
    if counts:
        # their mean, where tensors decided for each head
        return sum(edges_of(relation, work.n_k) for relation in counts) // len(counts)
    if stack.unknown is not None and work.decided:
        return None
    with suppress(TooMuch):
        if not work.reads and not work.decided:
            return edges_of(work.relation, work.n_k)
        if stack.inputs is not None:
            return edges_of(stack.relation(work.n_k, layer, heads[0]), work.n_k)
    return None


def _dense(work: Work, heads: int, size: int) -> _Amounts:
    pairs = work.n_q * work.n_k
    tensors = 4 * work.n_q * size
    # the mask as booleans, distances in eight bytes
    mask = pairs + (8 * pairs if work.changes.placed else 0)
    # scores are written, changed, weighed, and read for the product with the values; held at one
    # time are scores, masked ones, these less their maxima, and their exponentials
    return _Amounts(pairs, tensors + 8 * pairs, 4 * pairs * heads, mask, False, "exact")


def _decided(work: Work, heads: int, size: int) -> _Amounts:
    """What is computed at most of a choice, its scores and orders left out."""
    pairs = int(most_keys(work.relation, work.n_k).sum())
    moved = 2 * work.n_q * size + 2 * pairs // 64 * size
    return _Amounts(pairs, moved, min(pairs, LIMITS.piece), 0, False, "bound")


def _torch(work: Work, heads: int, size: int) -> _Amounts:
    form, pairs = form_of(work), work.n_q * work.n_k
    # a mask is kept from call to call, and read by every head
    masks = pairs if work.changes or form is Form.MASK else 0
    # scores of a part of the queries and keys at a time
    elements = min(256, work.n_q) * min(512, work.n_k)
    return _Amounts(pairs, 4 * work.n_q * size + masks, elements, 0, True, "exact")


def _rows(work: Work, heads: int, size: int) -> _Amounts:
    pairs = work.n_q * len(row_keys(work)[0])
    moved = 4 * work.n_q * size + 8 * pairs
    return _Amounts(pairs, moved, 3 * pairs * heads, pairs, False, "exact")


def _tables(work: Work, heads: int, size: int) -> _Amounts:
    if work.decided:
        return _decided(work, heads, size)
    if work.decodes:
        return _rows(work, heads, size)
    return (_bands if TABLES.stepped(work, "cpu") else _tiles)(work, heads, size)


def _tiles(work: Work, heads: int, size: int) -> _Amounts:
    tile = TABLES.natural(work)[1]
    tiling = survey(Tiling(work.relation, work.n_q, work.n_k, NATURAL, (tile, tile)))
    tiles = round(tiling.tiles)
    pairs = min(tiles * tile * tile, work.n_q * work.n_k)
    # keys and values are gathered for every tile: read, written and read again
    gathered = 2 * 3 * tiles * tile * size
    # the formula keeps scores, distances and weights of a piece; a fused kernel its results
    elements = (6 if work.changes.placed else 4) * min(LIMITS.piece, pairs * heads)
    if work.plain:
        elements = min(2 * LIMITS.piece, 5 * heads * work.n_q * size // 4)
    masks = tile * tile * min(round(tiling.undecided), 1 << 12)
    moved = 2 * work.n_q * size + gathered
    quality: Quality = "estimate" if tiling.sampled else "bound"
    return _Amounts(pairs, moved, elements, masks, work.plain, quality)


def _bands(work: Work, heads: int, size: int) -> _Amounts:
    if work.reads:
        # laid out for the inputs of every call; never more than all pairs
        return replace(_dense(work, heads, size), quality="bound")
    pairs = moved = shared = 0
    quality: Quality = "bound"
    bands = work_bands(work)
    for index, band in enumerate(bands):
        tiles = band.tiles
        quality = "estimate" if tiles.sampled else quality
        full, undecided = map(round, tiles.area)
        pairs += full + undecided
        moved += 2 * work.n_q * size + 2 * (full + undecided) // max(1, band.sizes[0]) * size
        moved += 3 * work.n_q * size if index else 0
        moved += 8 * work.n_q * size if band.order != NATURAL else 0
        shared += 4 * min(undecided, 32 * band.sizes[0] * band.sizes[1])
    # keys in order, and results before they are merged, for as many heads as are computed together
    together = min(heads, max(1, LIMITS.heads_together // max(1, work.n_k * size)))
    elements = 3 * min(together * work.n_k * size, LIMITS.piece) // 2 + heads * work.n_q
    if work.changes.bends:
        # scores, what they are changed to step by step, weights
        elements += 12 * min(together * pairs, LIMITS.piece)
    return _Amounts(pairs, moved, elements, shared, True, quality)


def _edges(work: Work, heads: int, size: int) -> _Amounts:
    edges = edges_of(work.relation, work.n_k)
    # keys and values of every edge are read, its score is written, weighed and read again
    moved = 4 * work.n_q * size + 2 * edges * size + 6 * edges
    return _Amounts(edges, moved, 3 * edges, 4 * edges, False, "exact")


_AMOUNTS = {"torch": _torch, "dense": _dense, "tables": _tables, "edges": _edges}


# --- break-even -----------------------------------------------------------------------------------

SHORTEST_BREAK, LONGEST_BREAK = 16, 1 << 15
"""The lengths at which a plan is compared with the dense definition."""

MOST_BREAK = 1 << 18
"""The same, counted for every pattern of a graph: all of them are asked at each length."""


def longest_break(program: Program) -> int:
    """The longest sequence at which a plan of the program is compared."""
    most = max(patterns_in(attend.graph) for attend in program.attends)
    return min(LONGEST_BREAK, MOST_BREAK // max(1, most))


def break_even(stack: Stack) -> int | None:
    """The least length at which the plan is estimated to be cheaper than the dense definition, to a
    64th, found by doubling and halving; None where it is not up to `longest_break`."""
    require_built(stack.program)
    high, longest = SHORTEST_BREAK, longest_break(stack.program)
    while not _is_cheaper(stack, high):
        high *= 2
        if high > longest:
            return None
    low = high // 2
    while high - low > max(1, high // 64):
        middle = (low + high) // 2
        if _is_cheaper(stack, middle):
            high = middle
        else:
            low = middle
    return high


def _is_cheaper(stack: Stack, n: int) -> bool:
    program = stack.program
    plan = dense = 0.0
    sparse = False
    try:
        for (work, mine), layers in layers_of(program, program.head_count, n).items():
            chosen, heads = choose(work, "cpu"), len(mine) * len(layers)
            sparse |= chosen.name != TorchCall.name
            plan += heads * chosen.cost(work)
            dense += heads * dense_seconds(work)
    except AttnSpecError:
        return False
    # one call for all pairs is dense attention, if only for half of them
    return sparse and plan < dense
