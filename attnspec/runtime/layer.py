"""A multi-head layer around any spec: [B, n, embed_dim] in, the same out."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from attnspec.backends.planner import require_willing
from attnspec.ir.program import Program
from attnspec.ir.serial import plan_data
from attnspec.lower.lower import shares_keys
from attnspec.lower.mechanism_sizes import learned_parts, symbols_in
from attnspec.runtime.call_checks import FLOATS, check_dropout, check_layer
from attnspec.runtime.module import CompiledAttention

WHOLE = ("fourier", "mixer", "gmlp")
"""Mixings of the whole embedding, which know no heads."""

DEVIATION = 0.02
"""Of the numbers that extra tokens start with."""


class HasProgram(Protocol):
    """A spec, as far as a layer asks for it."""

    @property
    def program(self) -> Program:
        """The meaning in normal form."""


class SelfAttention(nn.Module):
    """Self-attention as one layer of a spec describes it.

    Queries, keys and values are projections of the input, their heads go through the spec, and what
    comes out is projected back; what no head of the layer reads is not projected. The mixings that
    have no heads take the whole embedding as one: `fourier` and `mixer` as it stands, without any
    projection, and `gmlp` as in its paper, `V s(GELU(U x))`. Neither the residual around the layer
    nor its norm belongs to it, but for those inside of the formula of `mixer`.

    The module holds what mechanisms of the layer learn, for each of `num_heads` heads, and the
    spec's extra tokens, which stand before every sequence and are left out of the output. `shared`
    is another layer of the spec, whose parameters this one takes where the spec shares them between
    all layers, `linformer(share = layer)`.

    Raises ValueError or TypeError for arguments that do not fit.
    """

    def __init__(
        self,
        spec: HasProgram,
        embed_dim: int,
        num_heads: int,
        layer: int = 0,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        backend: str = "auto",
        shared: SelfAttention | None = None,
    ) -> None:
        super().__init__()
        program = _program(spec)
        self.embed_dim, self.num_heads = _sizes(embed_dim, num_heads)
        if program.heads not in (None, self.num_heads):
            raise ValueError(
                f"`{program.name}` declares {program.heads} heads, got num_heads = {num_heads};"
                " to choose the count later, make it a parameter: `heads h` with `h` in the"
                " attention's parameters"
            )
        self.layer = check_layer(program, layer)
        self.dropout = check_dropout(dropout)
        require_willing(program, backend)
        program = of_layer(program, self.layer, self.num_heads)
        self.extra_tokens = program.extra_tokens
        self.mixing = _mixing(program)
        head_size = self.embed_dim if self.mixing else self.embed_dim // self.num_heads
        self.attention = CompiledAttention(plan_data(program, backend), head_size)
        if shared is not None:
            _share(self.attention, shared.attention)
        self.shared = _shared_heads(program)
        self.read = _read(program)
        width = self.embed_dim
        if self.read:
            self.in_weight = nn.Parameter(torch.empty(len(self.read) * width, width))
            self.in_bias = nn.Parameter(torch.empty(len(self.read) * width)) if bias else None
            self.out = nn.Linear(width, width, bias=bias)
        if self.extra_tokens:
            self.extra = nn.Parameter(torch.empty(self.extra_tokens, width))
        self._start(None)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Starts everything that is learned anew, drawn with the generator: projections as Glorot
        and Bengio's uniform numbers, without bias, mechanisms as their papers say."""
        self.attention.reset_parameters(generator)
        self._start(generator)

    def _start(self, generator: torch.Generator | None) -> None:
        if self.read:
            for weight in torch.split(self.in_weight, self.embed_dim):
                nn.init.xavier_uniform_(weight, generator=generator)
            nn.init.xavier_uniform_(self.out.weight, generator=generator)
            for bias in (self.in_bias, self.out.bias):
                if bias is not None:
                    nn.init.zeros_(bias)
        if self.extra_tokens:
            nn.init.normal_(self.extra, std=DEVIATION, generator=generator)

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, layer={self.layer}"

    def forward(
        self,
        x: torch.Tensor,
        *,
        key_padding_mask: torch.Tensor | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attention of x [B, n, embed_dim] with itself, of the same shape.

        `key_padding_mask` is bool [B, n], True for a real token; `inputs` are the tensors that the
        spec declares, for the n tokens of x. Extra tokens are real, in no set of tokens and of no
        id; lengths count from the first token of x and take the extra tokens in.
        """
        self._check(x)
        given = x.shape[1]
        if self.extra_tokens:
            x = torch.cat([self.extra.to(x.dtype).expand(len(x), -1, -1), x], 1)
            key_padding_mask = self._extended(key_padding_mask, True)
            inputs = self._extended_inputs(inputs)
        heads = 1 if self.mixing else self.num_heads
        q, k, v = (
            torch.unflatten(part, 2, (heads, -1)).transpose(1, 2) for part in self._projected(x)
        )
        if self.shared:
            # the keys of these heads are their queries
            same = torch.zeros(heads, dtype=torch.bool, device=x.device)
            same[list(self.shared)] = True
            k = torch.where(same[:, None, None], q, k)
        out = self.attention(
            q,
            k,
            v,
            layer=self.layer,
            key_padding_mask=key_padding_mask,
            dropout_p=self.dropout if self.training else 0.0,
            inputs=inputs,
        )
        out = out.transpose(1, 2).flatten(2)
        if self.extra_tokens:
            out = out[:, x.shape[1] - given :]
        result: torch.Tensor = self.out(out) if self.read else out
        return result

    def _projected(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values [B, n, embed_dim]; values in the place of what is not read."""
        if not self.read:
            return [x, x, x]
        both = functional.linear(x, self.in_weight, self.in_bias)
        if self.mixing == "gmlp":
            both = functional.gelu(both)
        found = dict(zip(self.read, both.chunk(len(self.read), -1), strict=True))
        return [found.get(name, found["v"]) for name in "qkv"]

    def _check(self, x: torch.Tensor) -> None:
        # whoever calls from outside may hand in anything
        given: object = x
        if not isinstance(given, torch.Tensor) or given.dtype not in FLOATS:
            kind = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
            raise TypeError(f"x must be a tensor of a floating type, got {kind}")
        if x.dim() != 3 or x.shape[2] != self.embed_dim:
            raise ValueError(f"x must be [B, n, {self.embed_dim}], got {list(x.shape)}")

    def _extended(self, tensor: torch.Tensor | None, value: bool | int) -> torch.Tensor | None:
        """What belongs to the tokens of x [B, n], with a value for each extra token before them."""
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2:
            # left to the checks of the attention
            return tensor
        return functional.pad(tensor, (self.extra_tokens, 0), value=value)

    def _extended_numbers(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The numbers of the tokens of x, NaN for extra tokens, which have none."""
        if self.extra_tokens and not tensor.is_floating_point():
            raise TypeError(
                f"the input `{name}` must be real beside extra tokens, which have no number, NaN;"
                f" got {tensor.dtype}"
            )
        if tensor.dim() != 2:
            return tensor
        return functional.pad(tensor, (self.extra_tokens, 0), value=float("nan"))

    def _extended_inputs(
        self, inputs: Mapping[str, torch.Tensor] | None
    ) -> dict[str, torch.Tensor] | None:
        if not isinstance(inputs, Mapping):
            return inputs
        kinds = {entry.name: entry.kind for entry in self.attention.program.inputs}
        found = dict(inputs)
        for name, tensor in inputs.items():
            if kinds.get(name) == "length" and isinstance(tensor, torch.Tensor):
                found[name] = tensor + self.extra_tokens
            elif kinds.get(name) == "numbers" and isinstance(tensor, torch.Tensor):
                found[name] = self._extended_numbers(name, tensor)
            elif name in kinds:
                # no set holds them
                extended = self._extended(tensor, False if kinds[name] == "tokens" else -1)
                found[name] = tensor if extended is None else extended
        return found


def of_layer(program: Program, layer: int, heads: int) -> Program:
    """The program of one layer alone, for a number of heads or for one mixing without heads.

    It serves every `layer` that it is called for, so that random graphs stay those of the layer.
    """
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


def _mixing(program: Program) -> str:
    """The mixing without heads that a layer is, or nothing."""
    mechanism = program.attends[0].mechanism
    return mechanism.name if program.heads is None and mechanism is not None else ""


def _shared_heads(program: Program) -> tuple[int, ...]:
    """The heads whose keys are their queries."""
    return tuple(
        head for head, slot in enumerate(program.row()) if shares_keys(program.attends[slot].graph)
    )


def _read(program: Program) -> str:
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


def _share(mine: CompiledAttention, other: CompiledAttention) -> None:
    """Puts the parameters of the other in the place of those that all layers share."""
    theirs = learned_parts(other.program)
    for entry, name in learned_parts(mine.program).items():
        if entry[1].layers and entry in theirs:
            mine.register_parameter(name, other.get_parameter(theirs[entry]))


def _program(spec: HasProgram) -> Program:
    # whoever calls from outside may hand in anything
    program: object = getattr(spec, "program", None)
    if not isinstance(program, Program):
        raise TypeError(
            f"spec must be a Spec, as attnspec.load and attnspec.parse return, got"
            f" {type(spec).__name__}"
        )
    return program


def _sizes(embed_dim: int, num_heads: int) -> tuple[int, int]:
    found = []
    for name, value in (("embed_dim", embed_dim), ("num_heads", num_heads)):
        try:
            size = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None
        if isinstance(value, bool) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value}")
        found.append(size)
    if found[0] % found[1]:
        raise ValueError(f"num_heads must divide embed_dim, got {embed_dim} and {num_heads}")
    return found[0], found[1]
