"""Graphs that the data decide: what a useful pair costs, choosing it included, and how that grows.

The keys that a choice is made for are drawn, so that lists differ from query to query, which is the
hardest case: nothing is shared. `lsh` stands beside Reformer's package, where that is installed,
and so do its matrix products alone, and these with the steps beside them that no way of computing
them in torch's operations leaves out: what computes them all is no faster.

Time can grow like the length where choosing takes as many operations for a token of every length.
That of `lsh` does with a number of buckets that stays. Where none is given there are 2 n / chunk,
as in its paper, and each token is projected on half as many directions in each round: n² in all,
which from n = 4 chunk² on is more than what chunks take. `cluster(count = c)` compares n tokens
with c centroids and reads n² / c pairs, so that no number of clusters takes less than n^1.5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec

import torch
from torch.nn import functional

from attnspec.backends.decided.hashes import farthest
from attnspec.bench.timing import Timing, alternate
from attnspec.spec import Spec, parse
from benchmarks.cases import BATCH, HEADS, SIZE, Settings
from benchmarks.efficiency import DENSE
from benchmarks.fresh import Arguments, Run, integer, peak, resident, text
from benchmarks.measuring import Json, exponent, missing, planned, tensors
from benchmarks.packages import reformer

BLOCKS, WIDTH = 16, 64
"""Blocks that a query reads, and their positions."""

TARGETS = {"chosen": 0.35, "topk": 1.3, "lsh": 4.0, "growth": 1.2}
"""The least efficiency of lists, the most that choosing may cost beside the product of its scores
and the tiles, how many times faster than the package `lsh` is, and the most that time may grow."""

PRODUCT, LISTS = "scores' product", "chosen"
"""What `topk` is made of, among the subjects."""

PRODUCTS = "lsh's products"
"""The matrix products of `lsh` alone, among the subjects."""

STEPS = "lsh's steps"
"""These and what cannot be left out beside them: what `lsh` would take if its buckets were sorted,
its pairs masked and its rounds merged in no time."""

ROUNDS, CHUNK = 4, 64
"""Of `lsh`."""

PROJECTED, TOGETHER = 512, 32
"""Tokens that are projected at once, and chunks computed at once: products in the cache."""

PACKAGE = "reformer-pytorch"
"""What `lsh` is compared with, among the subjects."""

BODIES = {
    LISTS: f"input sel: choices(size = {WIDTH})\n attend chosen(sel)",
    "topk": f"attend topk(blocks = {BLOCKS}, size = {WIDTH}, queries = 1)",
    "lsh": f"attend lsh(rounds = {ROUNDS}, chunk = {CHUNK})",
    "cluster": "attend cluster(count = isqrt(n))",
}
"""What is measured, by name."""

GROWN = {
    "lsh, 512 buckets": f"attend lsh(buckets = 512, rounds = {ROUNDS}, chunk = {CHUNK})",
    "lsh": BODIES["lsh"],
    "cluster": BODIES["cluster"],
}
"""Whose growth is measured, by name. Choosing takes each token of `FIXED` as many operations at
every length."""

FIXED = "lsh, 512 buckets"

SHARED = ("lsh", FIXED, PACKAGE)
"""Those whose keys are the queries."""


def spec_of(name: str) -> Spec:
    """The spec of a body, or of what the package does."""
    body = {**BODIES, **GROWN}["lsh" if name == PACKAGE else name]
    return parse(f"attention measured {{ {body} }}")


def subject(name: str, n: int, mode: str) -> Callable[[], object]:
    """One call, or one with the gradients of q, k and v, of a body, of the package, or of dense
    attention."""
    q, k, v = tensors(n)
    if name in SHARED:
        k = q
    module = None if name == DENSE else spec_of(name).compile()
    inputs = {"sel": drawn_lists(n)} if name == LISTS else None

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if module is None:
            return functional.scaled_dot_product_attention(q, k, v)
        if name == PACKAGE:
            return reformer(module, q, k, v)()
        out: torch.Tensor = module(q, q if name in SHARED else k, v, inputs=inputs)
        return out

    def forward() -> object:
        with torch.no_grad():
            return attend(q, k, v)

    def both() -> object:
        return torch.autograd.grad(attend(*given), asked, upstream)

    if mode == "forward":
        return forward
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    asked = given[::2] if name in SHARED else given
    upstream = torch.ones_like(q)
    return both


def drawn_lists(n: int) -> torch.Tensor:
    """Different blocks for every query and head, int64 [B, H, n, BLOCKS]."""
    generator = torch.Generator().manual_seed(1)
    blocks = max(1, n // WIDTH)
    shape = BATCH, HEADS, n, 1
    start = torch.randint(blocks, shape, generator=generator)
    step = torch.randint(1, max(2, blocks // BLOCKS + 1), shape, generator=generator)
    return (start + step * torch.arange(min(BLOCKS, blocks))) % blocks


def product(n: int) -> Callable[[], object]:
    """The scores of every query and block, in parts that stay in the cache."""
    q, k, _ = tensors(n)
    means = k[:, :, : n // WIDTH * WIDTH].reshape(BATCH, HEADS, -1, WIDTH, SIZE).mean(3)

    def run() -> object:
        return [q[:, :, low : low + 1024] @ means.mT for low in range(0, n, 1024)]

    return run


def products_of_lsh(n: int, mode: str, steps: bool = False) -> Callable[[], object]:
    """The matrix products of one call of `lsh`, or of one with gradients, in parts that stay in the
    cache: projections of the tokens, and the scores of each chunk with itself and the one before,
    their values, and on the way back the scores again and four gradients. With `steps` also, of the
    way there, the farthest column of each projection, the rows of q, k and v in the order of each
    round, and greatest scores, powers and their sums."""
    q, k, v = (x.flatten(0, 2) for x in tensors(n))
    columns = max(1, n // CHUNK)
    sides = torch.randn(ROUNDS * columns, SIZE)
    order = torch.randperm(len(q))
    rooms = [torch.empty_like(q) for _ in range(3)]
    products = torch.empty(len(sides) * PROJECTED)

    def project(low: int) -> None:
        rows = q[low : low + PROJECTED]
        room = products[: len(sides) * len(rows)].view(-1, len(rows))
        found = torch.mm(sides, rows.T, out=room)
        if steps:
            farthest(found.view(ROUNDS, columns, -1))

    def chunks(first: int) -> None:
        mine = [x[first * CHUNK :] for x in (rooms if steps else (q, k, v))]
        count = min(TOGETHER, len(mine[0]) // CHUNK - 1)
        at = count, 2 * CHUNK, SIZE
        keys, values = (x.as_strided(at, (CHUNK * SIZE, SIZE, 1)) for x in mine[1:])
        own = mine[0][CHUNK : (count + 1) * CHUNK].view(count, CHUNK, SIZE)
        scores = torch.bmm(own, keys.mT)
        if steps:
            scores.sub_(scores.amax(-1, keepdim=True)).exp2_().sum(-1)
        out = torch.bmm(scores, values)
        if mode == "both":
            weights, grad = torch.bmm(own, keys.mT), torch.bmm(out, values.mT)
            grads = weights.mT @ out, grad @ keys, grad.mT @ own
            del grads

    def run() -> object:
        for low in range(0, len(q), PROJECTED):
            project(low)
        for _ in range(ROUNDS):
            if steps:
                for x, room in zip((q, k, v), rooms, strict=True):
                    torch.index_select(x, 0, order, out=room)
            for first in range(0, len(q) // CHUNK - 1, TOGETHER):
                chunks(first)
        return None

    return run


def measure(settings: Settings, run: Run) -> dict[str, Json]:
    """Efficiency of lists, what choosing costs, growth, and memory."""
    n = settings.n
    timed: dict[str, dict[str, Timing]] = {}
    # it takes no other lengths
    there = find_spec("reformer_pytorch") is not None and n % (2 * WIDTH) == 0
    rivals = (DENSE, PACKAGE) if there else (DENSE,)
    for mode in ("forward", "both"):
        subjects = {name: subject(name, n, mode) for name in (*rivals, *BODIES)}
        subjects[PRODUCTS] = products_of_lsh(n, mode)
        subjects[STEPS] = products_of_lsh(n, mode, steps=True)
        if mode == "forward":
            subjects[PRODUCT] = product(n)
        timed[mode] = alternate(subjects, settings.rounds)
    edges = n * min(n, BLOCKS * WIDTH)
    eta = {
        mode: edges / n**2 * found[DENSE].median / found[LISTS].median
        for mode, found in timed.items()
    }
    found = timed["forward"]
    least = found[PRODUCT].median + found[LISTS].median
    return {
        "n": n,
        "rows": [
            {
                "name": name,
                "spec": BODIES[name],
                **{mode: found[name].data() for mode, found in timed.items()},
                "backends": planned(spec_of(name), n)["backends"],
            }
            for name in BODIES
        ],
        "dense": {mode: found[DENSE].data() for mode, found in timed.items()},
        "summary": {
            "eta_forward": eta["forward"],
            "eta_both": eta["both"],
            "topk": found["topk"].median / least,
            "lsh": _beside(timed, "lsh"),
            "products": _beside(timed, PRODUCTS),
            "steps": _beside(timed, STEPS),
        },
        "growth": _growth(settings),
        "memory": _memory(settings, run),
    }


def _beside(timed: Mapping[str, Mapping[str, Timing]], name: str) -> dict[str, Json]:
    """How many times faster than the package something is; None where that was not there."""
    return {
        mode: found[PACKAGE].median / found[name].median if PACKAGE in found else None
        for mode, found in timed.items()
    }


def _growth(settings: Settings) -> list[Json]:
    """How time grows, and the operations of choosing, by analysis."""
    rows: list[Json] = []
    for name in GROWN:
        values = [
            alternate({name: subject(name, n, "forward")}, settings.rounds)[name].median
            for n in settings.growth
        ]
        row: dict[str, Json] = {"name": name, "lengths": [*settings.growth], "seconds": [*values]}
        row["exponent"] = exponent(settings.growth, values)
        row["choosing"] = exponent(settings.growth, [choosing(name, n) for n in settings.growth])
        rows.append(row)
    return rows


def choosing(name: str, n: int) -> int:
    """The operations that a graph takes to choose its pairs."""
    return spec_of(name).analyse(n).scoring_flops or 0


def _memory(settings: Settings, run: Run) -> list[Json]:
    """The peaks of training steps, each in a process of its own."""
    rows: list[Json] = []
    for name in BODIES:
        for n in settings.memory:
            asked: Arguments = {"name": name, "n": n, "threads": torch.get_num_threads()}
            found = run("decided", asked)
            if "reason" in found:
                found = missing(name, found["reason"])
            rows.append({"name": name, "n": n, **found})
    return rows


def decided_task(arguments: Arguments) -> dict[str, Json]:
    """What one step needs at its peak beyond its inputs, choices among them, and gradients."""
    name, n = text(arguments, "name"), integer(arguments, "n")
    subject(name, 512, "both")()
    step = subject(name, n, "both")
    held = 4 * BATCH * HEADS * n * SIZE * torch.float32.itemsize
    # making the tensors took more at its peak than is held now
    before = resident()
    step()
    extra = peak() - before
    return {"extra_bytes": extra, "held_bytes": held, "ratio": extra / held}
