"""The exact part of `GRAPH + MECHANISM`: which pairs it has, and what they weigh, for one head."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from attnspec.formula import Formula, scale_of
from attnspec.relations import evaluate_pairs
from attnspec.target import Call, Work


def exact_pairs(work: Work, n_q: int, n_k: int) -> torch.Tensor:
    """bool [n_q, n_k]: the pairs of the graph."""
    rows, columns = np.arange(n_k - n_q, n_k)[:, None], np.arange(n_k)[None]
    held = evaluate_pairs(work.relation, rows, columns, n_k)
    return torch.from_numpy(np.broadcast_to(held, (n_q, n_k)).copy())


def exact_weights(
    work: Work, head: int, q: torch.Tensor, k: torch.Tensor, tables: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """exp of the scores [n_q, n_k] of q [n_q, d] and k [n_k, d], with their changes."""
    scores = (q @ k.T) * scale_of(work, q.shape[1])
    formula = Formula(work, (head,), q.device)
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    call = Call(tables={name: table[None] for name, table in tables.items()})
    changed = formula.changed(scores[None, None, None, None], distance[None], call)
    return torch.exp(changed[0, 0, 0, 0])
