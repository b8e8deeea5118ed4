"""Whether an attention reads no later position, or none behind those that a cache holds: shown by
its form, or examined pair by pair."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from attnspec.graphs.bind import bind_attended, situation_of
from attnspec.graphs.forms.properties import never_reads_later
from attnspec.graphs.relation import Relation, evaluate_pairs
from attnspec.graphs.stack import asks_for, decides
from attnspec.graphs.token_sets import Data
from attnspec.integrations.model_advice import READS_BOTH_WAYS
from attnspec.ir.program import Program
from attnspec.lower.lower import Binder
from attnspec.text.diagnostics import AttnSpecError


def why_not_past_only(program: Program, layer: int, heads: int, n: int, n_q: int) -> str:
    """Why the last n_q of n queries may read a key after themselves, "" where they do not.

    The pairs of every head are examined where the form does not decide; a graph whose pairs
    depend on run-time inputs or on the data must be causal by its form.
    """
    if is_past_only(program, layer):
        return ""
    attends = program.attends_of(layer)
    graphs = [attend.graph for attend in attends if attend.mechanism is None and attend.graph]
    if len(graphs) < len(attends):
        return leaks(program, "its mechanism reads every position")
    if any(map(decides, graphs)):
        return leaks(program, "its pairs are chosen in each call")
    for work, those in Binder(program).works(layer, heads, n_q, n):
        if work.reads:
            return leaks(program, f"its pairs depend on the input `{work.reads[0]}`")
        for first, last in work.relation.chunks(n):
            q, k = work.relation.rows(max(first, n - n_q), max(last, n - n_q), n)
            later = k > q
            if later.any():
                index = int(later.argmax())
                where = "" if len(those) == heads else f"in head {those[0]}, "
                return leaks(program, f"{where}position {q[index]} reads position {k[index]}")
    return ""


_AT_ONCE = 1 << 22
"""How many pairs are examined in one piece."""


def is_past_only(program: Program, layer: int) -> bool:
    """Whether it shows in the form of a layer that it reads no later position."""
    attends = program.attends_of(layer)
    return program.causal or all(
        attend.mechanism is None and attend.graph is not None and never_reads_later(attend.graph)
        for attend in attends
    )


def require_rows_done(
    program: Program,
    of: tuple[int, int],
    positions: tuple[int, int],
    inputs: Mapping[str, Tensor],
    padding: Tensor | None,
    *,
    real_alone: bool,
) -> None:
    """Raise AttnSpecError if in a layer, `of` so many heads, a row before the first of
    `positions` reads a key from there to the last, which was not there when it was computed.

    Tensors of `inputs` and `padding` are of all positions, one for each sample; with `real_alone`
    padding takes no position.
    """
    layer, seen = of[0], set()
    for head in range(of[1]):
        attend = program.attend(layer, head)
        done = attend in seen and not (attend.graph and asks_for(attend.graph))
        if done or (attend.graph is not None and never_reads_later(attend.graph)):
            continue
        seen.add(attend)
        if attend.graph is None or attend.mechanism is not None:
            raise _unfinished(program, "its mechanism reads every position")
        if decides(attend.graph):
            raise _unfinished(program, "its pairs are chosen in each call")
        of_samples = [x for x in (*inputs.values(), padding) if x is not None]
        for sample in range(max(map(len, of_samples), default=1)):
            arrays = {name: x[sample % len(x)].cpu().numpy() for name, x in inputs.items()}
            real = None if padding is None else padding[sample % len(padding)].cpu().numpy()
            first, n = positions
            if real is not None and real_alone:
                arrays = {name: x[real] if x.ndim else x for name, x in arrays.items()}
                first, n, real = int(real[:first].sum()), int(real.sum()), None
            data = {name: Data(x) for name, x in arrays.items()}
            at = situation_of(program, n, layer, head, inputs=data)
            relation = bind_attended(attend.graph, at)
            pair = _late_pair(relation, first, n, real)
            if pair is not None:
                text = f"position {pair[0]} reads position {pair[1]}"
                raise _unfinished(program, text)


def _late_pair(
    relation: Relation, first: int, n: int, real: np.ndarray | None
) -> tuple[int, int] | None:
    """A query before `first` and a key from there on that are real and a pair; None for none."""
    k, size = np.arange(first, n)[None], max(1, _AT_ONCE // max(1, n - first))
    for start in range(0, first, size):
        q = np.arange(start, min(start + size, first))[:, None]
        reads = evaluate_pairs(relation, q, k, n)
        reads = reads if real is None else reads & real[q] & real[k]
        if reads.any():
            row, key = divmod(int(reads.argmax()), n - first)
            return start + row, first + key
    return None


def _unfinished(program: Program, reason: str) -> AttnSpecError:
    return AttnSpecError(
        f"decoding with a cache would give other results than one call: in `{program.name}`"
        f" {reason}, which was not there in an earlier call; pass all of a prefix in the first"
        " call, or `use_cache=False`"
    )


def leaks(program: Program, reason: str) -> str:
    """The warning about a spec that may read later positions where it must not."""
    return (
        f"the model must not read later positions, and `{program.name}` may: {reason}; write"
        f" the statement `causal` in the spec{READS_BOTH_WAYS}"
    )
