"""A plan over several devices as tables, and its links as a picture of ranks x ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnspec.text.diagnostics import three_digits

SHADES = " ░▒▓█"
"""No byte, and ever more of them, up to the fullest link."""

WIDEST = 64
"""Columns of a picture; of more ranks several stand in one cell."""

WAYS = {
    "rows": "key rows, and queries that read nearly all keys",
    "states": "sums over each rank's keys, merged a share by each rank",
    "heads": "all positions of some heads to each rank (all-to-all)",
    "all": "everything to every rank (all-gather)",
}


def printed(plan: Mapping[str, Any]) -> str:
    """A plan, as `DistributedPlan.to_dict` gives it, in words, a table of ranks and a picture."""
    lengths, links = plan["lengths"], np.array(plan["links"], np.int64)
    lines = [
        f"{plan['name']}, n = {plan['n']}, {plan['devices']} devices; {plan['batch']} x"
        f" {plan['heads']} heads of {plan['head_size']} ({plan['key_heads']} of keys),"
        f" {plan['element']} bytes per number",
        f"partition   {plan['partition']}: {min(lengths):,} to {max(lengths):,} positions per rank",
    ]
    lines += [
        f"            {each['partition']}: {_seconds(each['seconds'])},"
        f" {_bytes(each['bytes'])} at most, balance {_ratio(each['balance'])}"
        for each in plan["considered"][1:]
    ]
    for layer in plan["layers"]:
        lines += _layer(layer, plan["link"], plan["speed"])
    received = plan["bytes_received"]
    lines += [
        f"a rank receives {_bytes(min(received))} to {_bytes(max(received))} forward, the same"
        f" again backward; an all-gather of keys: {_bytes(plan['bytes_gathered'])}",
        "rank   positions     received         sent    from    to",
    ]
    # a line for each rank, for a few of many
    ranks = len(lengths)
    for rank in range(ranks) if ranks <= 16 else (0, 1, 2, ranks // 2, ranks - 1):
        got, sent = links[:, rank], links[rank]
        lines.append(
            f"{rank:>4}{lengths[rank]:>12,}{_bytes(int(got.sum())):>13}"
            f"{_bytes(int(sent.sum())):>13}{int((got > 0).sum()):>8}{int((sent > 0).sum()):>6}"
        )
    return "\n".join([*lines, *picture(links)])


def _layer(layer: Mapping[str, Any], link: float, speed: float) -> list[str]:
    numbers = layer["layers"]
    few = ", ".join(map(str, numbers[:6])) + (", …" if len(numbers) > 6 else "")
    where = f"layers {few}" if len(numbers) > 1 else f"layer {few}"
    why = f": {layer['why']}" if layer["why"] else ""
    lines = [f"{where}     {WAYS[layer['how']]}{why}"]
    work = layer["work_seconds"]
    beside = f", work {_seconds(work)} at {speed:.3g} operations per second" if work else ""
    lines.append(
        f"            travels {_seconds(layer['travel_seconds'])} at {link:.3g} bytes per"
        f" second{beside}; balance {_ratio(layer['balance'])}"
    )
    if layer["how"] == "rows" and work and layer["travel_seconds"]:
        lines.append(
            f"            {layer['hidden']:.0%} of the transfer overlaps with work; in all"
            f" {_seconds(layer['seconds'])}"
        )
    return lines


def picture(links: np.ndarray) -> list[str]:
    """The links as shades: a row for each rank that receives, a column for each that sends."""
    ranks = len(links)
    each = -(-ranks // WIDEST)
    cells = -(-ranks // each)
    room = np.pad(links.T, (0, cells * each - ranks))
    full = room.reshape(cells, each, cells, each).sum((1, 3))
    most = full.max(initial=0)
    if not most:
        return ["nothing travels"]
    shade = np.where(full > 0, 1 + np.minimum(3, (4 * full / most).astype(int)), 0)
    lines = [f"receiver (down) x sender (across), full = {_bytes(int(most))}"]
    return [*lines, *("|" + "".join(SHADES[cell] for cell in row) + "|" for row in shade)]


def _bytes(count: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:g} B"


def _seconds(seconds: float) -> str:
    return f"{three_digits(1e3 * seconds)} ms"


def _ratio(value: float | None) -> str:
    return "not counted" if value is None else f"{value:.3f}"
