"""One layer of a spec by itself, and what a multi-head layer around it asks of it."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Protocol

import torch

from attnspec.ir.program import Program
from attnspec.lower.lower import shares_keys
from attnspec.lower.mechanism_sizes import symbols_in

WHOLE = ("fourier", "mixer", "gmlp")
"""Mixings of the whole embedding, which know no heads."""


class HasProgram(Protocol):
    """A spec, as far as a layer asks for it."""

    @property
    def program(self) -> Program:
        """The meaning in normal form."""


def of_layer(program: Program, layer: int, heads: int, two: bool = False) -> Program:
    """The program of one layer alone, for a number of heads or for one mixing without heads.

    It serves every `layer` that it is called for, so that random graphs stay those of the layer.
    A layer of `two` sequences takes specs that say `cross`, others raise ValueError.
    """
    if program.cross and not two:
        raise ValueError(
            f"`{program.name}` joins two sequences, and a layer of self-attention has one: give it"
            " to `attnspec.MultiheadAttention`, or call the compiled module with queries of the one"
            " and keys of the other"
        )
    row = program.row(layer)
    attend = program.attends[row[0]]
    mechanism = attend.mechanism if attend.graph is None and len(set(row)) == 1 else None
    whole = mechanism is not None and mechanism.name in WHOLE
    if mechanism is not None and whole and "head" not in symbols_in(mechanism):
        row, count = row[:1], None
    else:
        row, count = (row * heads)[:heads], heads
    kept = sorted(set(row))
    return replace(
        program,
        attends=tuple(program.attends[slot] for slot in kept),
        slots=(tuple(kept.index(slot) for slot in row),),
        layers=None,
        heads=count,
    )


def mixing_of(program: Program) -> str:
    """The mixing without heads that a layer is, or nothing."""
    mechanism = program.attends[0].mechanism
    return mechanism.name if program.heads is None and mechanism is not None else ""


def shared_heads(program: Program) -> tuple[int, ...]:
    """The heads whose keys are their queries."""
    return tuple(
        head for head, slot in enumerate(program.row()) if shares_keys(program.attends[slot].graph)
    )


def read_of(program: Program) -> str:
    """Which of q, k and v the heads of a layer read."""
    found: set[str] = set()
    for attend in program.attends:
        if shares_keys(attend.graph):
            found |= set("qv")
            continue
        mechanism = attend.mechanism
        arguments = {} if mechanism is None else dict(mechanism.arguments)
        if program.heads is None and mechanism is not None:
            found |= set("qv") if mechanism.name == "gmlp" else set()
        elif attend.graph is not None or mechanism is None:
            found |= set("qkv")
        elif mechanism.name in WHOLE:
            found |= set("qv") if mechanism.name == "gmlp" else set("v")
        elif mechanism.name == "synthesizer" and not arguments.get("products", False):
            dense = arguments.get("kind", "dense") in ("dense", "factorized_dense")
            found |= set("qv") if dense else set("v")
        else:
            found |= set("qkv")
    return "".join(name for name in "qkv" if name in found)


def with_shared_keys(q: torch.Tensor, k: torch.Tensor, shared: tuple[int, ...]) -> torch.Tensor:
    """The keys [B, H, n, d] with queries in their place for the heads that share them."""
    if not shared:
        return k
    same = torch.zeros(k.shape[1], dtype=torch.bool, device=k.device)
    same[list(shared)] = True
    return torch.where(same[:, None, None], q, k)


def program_of(spec: HasProgram) -> Program:
    """The program of a spec; TypeError for anything else."""
    # whoever calls from outside may hand in anything
    program: object = getattr(spec, "program", None)
    if not isinstance(program, Program):
        given: object = spec
        more = {
            str: ": `attnspec.parse(text)` makes one of a text, `attnspec.zoo(name)` of a name",
            int: ": the spec comes first, then the sizes",
        }
        raise TypeError(
            f"spec must be a Spec, as attnspec.load and attnspec.parse return, got"
            f" {type(given).__name__}{more.get(type(given), '')}"
        )
    return program


def sizes_of(program: Program, embed_dim: int, num_heads: int) -> tuple[int, int]:
    """The sizes as integers; raises unless heads divide the embedding and are those declared."""
    width, heads = size_of("embed_dim", embed_dim), size_of("num_heads", num_heads)
    if width % heads:
        raise ValueError(f"num_heads must divide embed_dim, got {width} and {heads}")
    if program.heads not in (None, heads):
        raise ValueError(
            f"`{program.name}` declares {program.heads} heads, got num_heads = {heads};"
            " to choose the count later, make it a parameter: `heads h` with `h` in the"
            " attention's parameters"
        )
    return width, heads


def size_of(name: str, value: object) -> int:
    """A size of at least 1 as an integer; TypeError or ValueError for anything else."""
    try:
        size = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None
    if isinstance(value, bool) or size < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value}")
    return size
