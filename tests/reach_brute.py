"""What a stack reaches, by boolean products of its masks, and small versions of the zoo."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt
from zoo import ATTENTIONS, loaded, sample

from attnspec.graphs.stack import Sample, Stack
from attnspec.spec import Spec, load

FAR = 10**6
"""Stands for never."""

SMALL = {
    "block": 4,
    "stride": 5,
    "radius": 3,
    "keys": 5,
    "chunk": 8,
    "group": 6,
    "prompt": 6,
    "globals": 2,
    "cells": 2,
    "verticals": 2,
    "recent": 6,
    "sinks": 2,
    "low": 2,
    "high": 8,
    "frames": 3,
    "tokens": 16,
    "height": 6,
    "width": 8,
    "tile": 2,
    "distance": 3,
}
"""Parameters by name, so that a pattern is more than `full` at n = 64."""

APART: dict[str, dict[str, int]] = {
    "axial_attention": {},
    "neighborhood_2d": {"size": 3},
    "neighborhood_3d": {"height": 4, "width": 5, "size": 3},
    "neighborhood_dilated": {"radius": 1},
    "sliding_tile_3d": {"frames": 4, "height": 4, "width": 4, "tile": 2},
    "swin": {"size": 3, "width": 9},
    "openai_fixed": {"stride": 8, "block": 2},
    "sparse_videogen": {"frames": 2, "tokens": 24, "prompt": 5},
}
"""What differs from SMALL, by name of the attention."""


@dataclass(frozen=True)
class Small:
    """A spec of the zoo or of a test, at one length."""

    spec: Spec
    n: int
    inputs: Sample | None = None

    @cached_property
    def stack(self) -> Stack:
        return self.spec.stack(self.inputs)

    @cached_property
    def masks(self) -> dict[tuple[int, int], npt.NDArray[np.bool_]]:
        heads = range(self.spec.heads or 1)
        slots = [(layer, head) for layer in range(self.spec.layers) for head in heads]
        return {slot: self.stack.mask(self.n, *slot) for slot in slots}

    def mask(self, layer: int, head: int) -> npt.NDArray[np.bool_]:
        return self.masks[layer, head]

    @cached_property
    def layers(self) -> list[npt.NDArray[np.bool_]]:
        """The union of the heads of each layer."""
        heads = range(self.spec.heads or 1)
        return [
            np.logical_or.reduce([self.mask(layer, head) for head in heads])
            for layer in range(self.spec.layers)
        ]

    @cached_property
    def allowed(self) -> npt.NDArray[np.bool_]:
        every = np.ones((self.n, self.n), bool)
        return np.tril(every) if self.spec.program.causal else every

    @cached_property
    def hops(self) -> npt.NDArray[np.int64]:
        """Layers until each query has read each key, by the definition; FAR for never."""
        return product_hops(self.layers)

    @cached_property
    def distances(self) -> npt.NDArray[np.int64]:
        """The same in the union of all layers."""
        return product_hops([np.logical_or.reduce(self.layers)])


def product_hops(layers: list[npt.NDArray[np.bool_]]) -> npt.NDArray[np.int64]:
    """The least L for which (A_{L-1} or I) … (A_0 or I) holds each pair, FAR for none."""
    n = len(layers[0])
    read = np.eye(n, dtype=bool)
    found = np.where(read, 0, FAR)
    done = 0
    while True:
        graph = layers[min(done, len(layers) - 1)] | np.eye(n, dtype=bool)
        # sums of at most n ones, exact in float32
        grown = (graph.astype(np.float32) @ read.astype(np.float32)) > 0
        done += 1
        found[grown & (found == FAR)] = done
        if done >= len(layers) and np.array_equal(grown, read):
            return found
        read = grown


@cache
def small_zoo() -> dict[str, Small]:
    """Every attention of the zoo within one sequence whose pairs are known, at one small length."""
    found = {}
    for path, name in ATTENTIONS:
        spec = loaded(path, name)
        wanted = {**SMALL, **APART.get(name, {})}
        changed = {
            key: wanted[key]
            for key, value in spec.parameters.items()
            if key in wanted and not isinstance(value, str)
        }
        if changed:
            spec = load(path, name=name, parameters=changed)
        n = spec.stack().program.fixed_length or 48
        small = Small(spec, n, sample(spec, n) or None)
        if small.stack.unknown is None and not spec.program.cross:
            found[name] = small
    return found
