"""A plan over several devices as tables, and its links as a picture of ranks x ranks."""

from __future__ import annotations

import numpy as np

from attnspec.distributed.planning import (
    ALL,
    HEADS,
    LINK,
    ROWS,
    SPEED,
    DistributedPlan,
    LayerPlan,
    numbers_of,
)

SHADES = " ░▒▓█"
"""No byte, and ever more of them, up to the fullest link."""

WIDEST = 64
"""Columns of a picture; of more ranks several stand in one cell."""

WAYS = {
    ROWS: "rows of keys and queries, as the graph asks for them",
    HEADS: "all positions of some heads to each rank (all-to-all)",
    ALL: "everything to every rank (all-gather)",
}


def printed(plan: DistributedPlan) -> str:
    """The plan in words, a table of ranks and a picture."""
    t, lengths = plan.tensors, plan.partition.lengths
    lines = [
        f"{plan.program.name}, n = {plan.n}, {plan.ranks} devices; {t.batch} x {t.heads} heads of"
        f" {t.head_dim} ({t.key_heads} of keys), {t.element} bytes a number",
        f"partition   {plan.partition}: {min(lengths):,} to {max(lengths):,} positions a rank",
    ]
    for each in plan.considered[1:]:
        lines.append(
            f"            {each.partition}: {_seconds(each.seconds)}, {_bytes(each.bytes)} at most,"
            f" balance {_ratio(each.balance)}"
        )
    for layer in plan.layers:
        lines += _layer(plan, layer)
    received, gathered = plan.bytes_received, plan.bytes_gathered
    least, most = min(received, default=0), max(received, default=0)
    lines += [
        f"a rank gets {_bytes(least)} to {_bytes(most)} forward, the same again backward;"
        f" gathering every key: {_bytes(gathered)}",
        *plan.changes,
        *_table(plan),
        *picture(plan.links),
    ]
    return "\n".join(lines)


def _layer(plan: DistributedPlan, layer: LayerPlan) -> list[str]:
    where = (
        f"layers {numbers_of(layer.layers)}"
        if len(layer.layers) > 1
        else (f"layer {layer.layers[0]}")
    )
    links, proved = layer.links, layer.proved
    why = f": {layer.why}" if layer.why else ""
    lines = [f"{where}     {WAYS[layer.how]}{why}"]
    if proved is not None:
        total = int(links.sum())
        same = "=" if proved == total else "<="
        lines.append(f"            flow {proved:,} {same} cut {total:,} bytes of all links forward")
    received = int(layer.received.max(initial=0)) / LINK
    work = None if layer.work is None else layer.seconds(plan.tensors) - received
    beside = "" if work is None else f", work {_seconds(work)} at {SPEED:.0e} operations a second"
    lines.append(
        f"            rows travel {_seconds(received)} at {LINK:.0e} bytes a second{beside};"
        f" balance {_ratio(layer.balance)}"
    )
    if layer.how == ROWS:
        lines.append("            own keys are weighed while rows travel")
    return lines


def _table(plan: DistributedPlan) -> list[str]:
    """A line for each rank, for a few of many."""
    links = plan.links
    shown = range(plan.ranks) if plan.ranks <= 16 else [0, 1, 2, plan.ranks // 2, plan.ranks - 1]
    lines = ["rank   positions     received         sent    from    to"]
    for rank in shown:
        lines.append(
            f"{rank:>4}{plan.partition.lengths[rank]:>12,}{_bytes(int(links[:, rank].sum())):>13}"
            f"{_bytes(int(links[rank].sum())):>13}{int((links[:, rank] > 0).sum()):>8}"
            f"{int((links[rank] > 0).sum()):>6}"
        )
    return lines


def picture(links: np.ndarray) -> list[str]:
    """The links as shades: a row for each rank that receives, a column for each that sends."""
    ranks = len(links)
    each = -(-ranks // WIDEST)
    cells = -(-ranks // each)
    room = np.zeros((cells * each,) * 2)
    room[:ranks, :ranks] = links.T
    full = room.reshape(cells, each, cells, each).sum((1, 3))
    most = full.max(initial=0)
    if not most:
        return ["nothing travels"]
    shade = np.where(full > 0, 1 + np.minimum(3, (4 * full / most).astype(int)), 0)
    lines = [f"receiver (down) x sender (across), full = {_bytes(int(most))}"]
    return [*lines, *("|" + "".join(SHADES[cell] for cell in row) + "|" for row in shade)]


def as_data(plan: DistributedPlan) -> dict[str, object]:
    """A plan as plain data."""
    t = plan.tensors
    return {
        "name": plan.program.name,
        "n": plan.n,
        "devices": plan.ranks,
        "batch": t.batch,
        "heads": t.heads,
        "key_heads": t.key_heads,
        "head_size": t.head_dim,
        "element": t.element,
        "partition": str(plan.partition),
        "lengths": list(plan.partition.lengths),
        "bytes_received": list(plan.bytes_received),
        "bytes_gathered": plan.bytes_gathered,
        "links": plan.links.tolist(),
        "layers": [
            {
                "layers": list(layer.layers),
                "how": layer.how,
                "why": layer.why,
                "bytes": int(layer.links.sum()),
                "flow": layer.proved,
                "balance": layer.balance,
            }
            for layer in plan.layers
        ],
        "considered": [
            {
                "partition": str(each.partition),
                "seconds": each.seconds,
                "bytes": each.bytes,
                "balance": each.balance,
            }
            for each in plan.considered
        ],
        "changes": list(plan.changes),
    }


def _bytes(count: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:g} B"


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _ratio(value: float | None) -> str:
    return "not counted" if value is None else f"{value:.3f}"
