"""Seconds for a unit of each kind of work, on a CPU and on a GPU.

A backend says how much of what a work takes: calls, pairs of tiles, tokens put in order. Its
estimate is the sum of these amounts, each times its rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Amounts: TypeAlias = Mapping[str, float]
"""How much of what a work takes, by the names of rates."""

SHARED = frozenset(
    {
        *("dense_call", "torch_call", "tiles_call", "bands_step"),
        *("flex_step", "triton_call", "sums_call"),
    }
)
"""What is done once for all samples and heads."""


@dataclass(frozen=True)
class DeviceRates:
    """What all devices have a rate for: plain tensor operations, and torch's own attention."""

    dense_call: float
    """A call of the definition."""

    dense_pair: float
    """A pair: scores, mask, softmax and sum of values, one after the other."""

    torch_call: float
    """A call of torch's own attention."""

    torch_pair: float
    """A pair that it looks at."""

    torch_masked: float
    """What a pair costs more where a mask is added."""

    tiles_call: float
    """A call."""

    tiles_row: float
    """A query tile: its share of calls, gathers and copies."""

    tiles_pair_32: float
    """A pair of a tile of 32 queries and 32 keys."""

    tiles_pair_64: float
    """A pair of a tile of 64 queries and 64 keys."""

    tiles_pair_128: float
    """A pair of a tile of 128 queries and 128 keys."""

    tiles_masked: float
    """What a pair costs more in a tile that needs a mask of its own."""

    scattered_call: float
    """A call."""

    scattered_row: float
    """A query."""

    scattered_edge: float
    """An edge: its score, its softmax and its value."""

    scattered_gathered: float
    """What an edge costs more where its key and value are gathered: scores that are changed, other
    normalisers, other devices."""

    def seconds(self, amounts: Amounts, copies: int = 1) -> float:
        """The estimate of a work that takes these amounts, one of so many that share its calls;
        infinity where one of the rates was not measured."""
        found = 0.0
        for name, amount in amounts.items():
            found += amount * float(getattr(self, name)) / (copies if name in SHARED else 1)
        return found


@dataclass(frozen=True)
class Rates(DeviceRates):
    """For one head of size 64 in float32, forward, on a CPU; measured with two threads."""

    dense_call: float = 2e-5
    dense_pair: float = 6e-9
    torch_call: float = 2e-5
    torch_pair: float = 1.7e-9
    torch_masked: float = 0.1e-9
    tiles_call: float = 3e-5
    tiles_row: float = 2e-6
    tiles_pair_32: float = 9e-9
    tiles_pair_64: float = 7.5e-9
    tiles_pair_128: float = 6.5e-9
    tiles_masked: float = 0.4e-9
    scattered_call: float = 2.5e-5
    scattered_row: float = 8e-8
    scattered_edge: float = 5.4e-9
    scattered_gathered: float = 1.3e-8

    bands_step: float = 2e-5
    """A step: its calls."""

    bands_row: float = 2e-7
    """A query tile of a step."""

    bands_query: float = 5e-8
    """A query of a step, whatever it reads."""

    bands_pair: float = 2.2e-9
    """A pair of a tile."""

    bands_masked: float = 0.2e-9
    """What a pair costs more in a tile with a mask."""

    bands_gather: float = 2e-8
    """A key of a query tile whose key tiles do not follow one another."""

    bands_reorder: float = 3e-8
    """A position whose key and value are put in order."""

    bands_merge: float = 8e-8
    """A query whose results of two steps are merged."""

    bands_layout: float = 1.7e-3
    """Laying out the run-time inputs of a call."""


@dataclass(frozen=True)
class GpuRates(DeviceRates):
    """For one head of size 64 in bfloat16, forward, on a GPU that is busy with many heads.

    Rows and pairs of `flex` and `triton` are set by hand, from the times of kernels of windows,
    causal and strided graphs on an NVIDIA H200; `attnspec calibrate --device cuda` has not been run
    to its end there. The others are derived for that class of GPU from what is published of it. A
    fused kernel of the second generation reaches 350 TFLOP/s at heads of 128 (FlexAttention and
    flash attention 2 alike), taken for 300 at heads of 64, where a pair is 256 operations; memory
    gives 3.3 TB/s, of which plain operations reach 2.5; an operation of torch is launched in 6 us.
    """

    dense_call: float = 7e-5  # a dozen operations
    dense_pair: float = 1.6e-11  # a float32 score written or read ten times
    torch_call: float = 1e-5
    torch_pair: float = 8.5e-13
    torch_masked: float = 2.5e-12  # a mask takes another kernel, of a third of the speed
    tiles_call: float = 3e-5
    tiles_row: float = 7e-7  # a piece of 2^20 numbers, some 90 tiles, is a dozen operations
    # a tile's keys and values are written and read again: 3 * 256 bytes for each key
    tiles_pair_32: float = 1.2e-11
    tiles_pair_64: float = 7.1e-12
    tiles_pair_128: float = 4.7e-12
    tiles_masked: float = 1e-12
    scattered_call: float = 1e-4
    scattered_row: float = 1e-9
    scattered_edge: float = 1e-11
    scattered_gathered: float = 3e-10  # its key and value written and read three times

    flex_step: float = 4e-5
    """A step of FlexAttention: guards, block lists and the kernel's launch."""

    flex_row: float = 1e-7
    """A block of 128 queries of a step: a program's start and end, 132 of them at once."""

    flex_pair: float = 1.1e-12
    """A pair of a block."""

    flex_masked: float = 3e-12
    """What a pair costs more in a block with a mask: two loads and some twenty integer operations;
    less where the keys of a query are one or two runs."""

    flex_reorder: float = 5e-10
    """A position whose query, key, value and output are put in order."""

    flex_merge: float = 3e-10
    """A query whose results of two steps are merged."""

    triton_call: float = 4e-5
    """A call of the kernel of tile lists."""

    triton_row: float = 1.3e-7
    """A query tile: a program's start and end, 132 of them at once."""

    triton_pair: float = 1.3e-12
    """A pair of a tile."""

    triton_masked: float = 2.8e-12
    """What a pair costs more in a tile with a mask of bits, 2 KB for 128 x 128."""

    triton_merge: float = 2e-10
    """A query whose output is read and written once more."""

    sums_call: float = 4e-5
    """A call of the kernels of sums of features."""

    sums_pair: float = 1.7e-12
    """256 operations of these sums: half as fast as a pair of a tile, as their states are written
    and read."""
