"""A sequence over several devices: who holds which positions, and which rows travel.

`plan` works on paper, without torch; `parallelize` runs a compiled module over a mesh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnspec.distributed.exchange import Tensors
from attnspec.distributed.partitions import Partition
from attnspec.distributed.planning import DistributedPlan, Rates, plan

if TYPE_CHECKING:
    from attnspec.distributed.collectives import LostRank
    from attnspec.distributed.parallel import ParallelAttention, parallelize

__all__ = [
    "DistributedPlan",
    "LostRank",
    "ParallelAttention",
    "Partition",
    "Rates",
    "Tensors",
    "parallelize",
    "plan",
]


def __getattr__(name: str) -> Any:
    # torch is loaded where ranks compute, not where they are planned
    home = {"LostRank": "collectives", "ParallelAttention": "parallel", "parallelize": "parallel"}
    if name not in home:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{home[name]}"), name)
