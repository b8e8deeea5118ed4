"""A multi-head layer around any spec: [B, n, embed_dim] in, the same out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Never, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from attnspec.backends.planner import require_willing
from attnspec.ir.serial import plan_data
from attnspec.lower.mechanism_sizes import learned_parts
from attnspec.runtime.call_checks import FLOATS, check_dropout, check_layer, refuse_unknown
from attnspec.runtime.module import CompiledAttention
from attnspec.runtime.one_layer import (
    HasProgram,
    mixing_of,
    of_layer,
    program_of,
    read_of,
    shared_heads,
    size_of,
    sizes_of,
    with_shared_keys,
)
from attnspec.runtime.streaming import StreamState

Rotary: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
"""Turns q [B, H, n, d] and k [B, H_kv, n, d] by their positions, int64 [n]."""

DEVIATION = 0.02
"""Of the numbers that extra tokens start with."""


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

    With `num_kv_heads`, a divisor of `num_heads`, as many heads of keys and values serve equal
    numbers of heads of queries that follow one another. `rotary(q, k, positions)` returns queries
    [B, H, n, d] and keys [B, H_kv, n, d] that are turned by their positions, int64 [n], or changed
    in any other way that keeps their shapes; extra tokens have the first positions.

    Raises ValueError or TypeError for arguments that do not fit.
    """

    def __init__(
        self,
        spec: HasProgram,
        embed_dim: int,
        num_heads: int,
        layer: int = 0,
        *,
        num_kv_heads: int | None = None,
        rotary: Rotary | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        backend: str = "auto",
        shared: SelfAttention | None = None,
    ) -> None:
        super().__init__()
        program = program_of(spec)
        self.embed_dim, self.num_heads = sizes_of(program, embed_dim, num_heads)
        self.layer = check_layer(program, layer)
        self.dropout = check_dropout(dropout)
        require_willing(program, backend)
        program = of_layer(program, self.layer, self.num_heads)
        self.extra_tokens = program.extra_tokens
        self.mixing = mixing_of(program)
        head_size = self.embed_dim if self.mixing else self.embed_dim // self.num_heads
        self.attention = CompiledAttention(plan_data(program, backend), head_size)
        # layers that compute the same are one to what traces them
        self._drawn_as = self.attention.engine.binder.alike(self.layer)
        if shared is not None:
            _share(self.attention, shared.attention)
        self.shared = shared_heads(program)
        self.read = read_of(program)
        self.num_kv_heads = self._key_heads(num_kv_heads)
        self.rotary = self._checked_rotary(rotary)
        width, keys = self.embed_dim, self.embed_dim // self.num_heads * self.num_kv_heads
        self.widths = [width if name == "q" else keys for name in self.read]
        if self.read:
            self.in_weight = nn.Parameter(torch.empty(sum(self.widths), width))
            self.in_bias = nn.Parameter(torch.empty(sum(self.widths))) if bias else None
            self.out = nn.Linear(width, width, bias=bias)
        if self.extra_tokens:
            self.extra = nn.Parameter(torch.empty(self.extra_tokens, width))
        self._start(None)

    def _key_heads(self, count: int | None) -> int:
        """The heads of keys and values: as many as of queries where no number is given."""
        if count is None:
            return self.num_heads
        found = size_of("num_kv_heads", count)
        if self.num_heads % found:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got {found} and {self.num_heads}"
            )
        if found < self.num_heads and (self.shared or self.read != "qkv"):
            why = "keys are its queries" if self.shared else "it has no queries, keys and values"
            raise ValueError(
                f"`{self.attention.program.name}` has no fewer heads of keys, {why}: leave"
                f" num_kv_heads = {found} out"
            )
        return found

    def _checked_rotary(self, rotary: object) -> Rotary | None:
        if rotary is None:
            return None
        if not callable(rotary):
            raise TypeError(
                "rotary must be callable, rotary(q, k, positions) -> (q, k), got"
                f" {type(rotary).__name__}"
            )
        if self.shared and "q" in self.read and "k" not in self.read:
            raise ValueError(
                f"`{self.attention.program.name}` reads queries that are its keys, each once:"
                " positions that turn both have no place to; leave rotary out"
            )
        if "q" not in self.read or "k" not in self.read:
            raise ValueError(
                f"`{self.attention.program.name}` reads no queries and keys that positions could"
                " turn: leave rotary out"
            )
        return rotary

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Starts everything that is learned anew, drawn with the generator: projections as Glorot
        and Bengio's uniform numbers, without bias, mechanisms as their papers say."""
        self.attention.reset_parameters(generator)
        self._start(generator)

    def _start(self, generator: torch.Generator | None) -> None:
        if self.read:
            for weight in torch.split(self.in_weight, self.widths):
                nn.init.xavier_uniform_(weight, generator=generator)
            nn.init.xavier_uniform_(self.out.weight, generator=generator)
            for bias in (self.in_bias, self.out.bias):
                if bias is not None:
                    nn.init.zeros_(bias)
        if self.extra_tokens:
            nn.init.normal_(self.extra, std=DEVIATION, generator=generator)

    def extra_repr(self) -> str:
        grouped = f", num_kv_heads={self.num_kv_heads}"
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"
            f"{grouped if self.num_kv_heads < self.num_heads else ''}, layer={self.layer}"
        )

    def forward(
        self,
        x: torch.Tensor,
        *,
        key_padding_mask: torch.Tensor | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
        **unknown: Never,
    ) -> torch.Tensor:
        """Attention of x [B, n, embed_dim] with itself, of the same shape.

        `key_padding_mask` is bool [B, n], True for a real token; `inputs` are the tensors that the
        spec declares, for the n tokens of x. Extra tokens are real, in no set of tokens and of no
        id; lengths count from the first token of x and take the extra tokens in.
        """
        if unknown:
            refuse_unknown(self.attention.program, unknown, SelfAttention.forward)
        self._check(x)
        given = x.shape[1]
        if self.extra_tokens:
            x, key_padding_mask, inputs = self._with_extra(x, key_padding_mask, inputs)
        out = self.attention(
            *self._heads(x, 0),
            layer=self._drawn_as,
            key_padding_mask=key_padding_mask,
            dropout_p=self.dropout if self.training else 0.0,
            inputs=inputs,
        )
        return self._joined(out, given)

    def step(
        self,
        x: torch.Tensor,
        state: StreamState | None = None,
        *,
        key_padding_mask: torch.Tensor | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
        keep_all: bool = False,
        **unknown: Never,
    ) -> tuple[torch.Tensor, StreamState]:
        """Goes on with a causal layer: the outputs of the next t tokens x [B, t, embed_dim], the
        rows of a call with the whole sequence, and the state after them. It is None at the start;
        `key_padding_mask` and `inputs` are those of the t tokens, `keep_all` lets the state grow.
        No weights are dropped.

        Raises ValueError as `CompiledAttention.step` does, and in training with a dropout.
        """
        if unknown:
            refuse_unknown(self.attention.program, unknown, SelfAttention.step)
        self._check(x)
        if self.training and self.dropout:
            raise ValueError(
                "a step drops no weights, so that it is another thing than a call in training:"
                " call eval() first"
            )
        # whoever calls from outside may hand in anything
        given_state: object = state
        if given_state is not None and not isinstance(given_state, StreamState):
            kind = type(given_state).__name__
            raise TypeError(f"state must be what a step returned, or None, got {kind}")
        given = x.shape[1]
        if self.extra_tokens and state is None:
            x, key_padding_mask, inputs = self._with_extra(x, key_padding_mask, inputs)
        out, state = self.attention.step(
            *self._heads(x, 0 if state is None else state.position),
            state,
            layer=self._drawn_as,
            key_padding_mask=key_padding_mask,
            inputs=inputs,
            keep_all=keep_all,
        )
        return self._joined(out, given), state

    def _heads(
        self, x: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [B, H, n, d], k and v [B, H_kv, n, d] of tokens whose first has this position."""
        counts = [1] * 3 if self.mixing else [self.num_heads] + 2 * [self.num_kv_heads]
        q, k, v = (
            torch.unflatten(part, 2, (count, -1)).transpose(1, 2)
            for part, count in zip(self._projected(x), counts, strict=True)
        )
        k = with_shared_keys(q, k, self.shared)
        if self.rotary is not None:
            positions = self.attention.positions(first, x.shape[1], x.device)
            q, k = _turned(self.rotary, q, k, positions)
        return q, k, v

    def _joined(self, out: torch.Tensor, given: int) -> torch.Tensor:
        """What the heads found [B, H, n, d] as [B, given, embed_dim], of the last tokens."""
        out = out.transpose(1, 2).flatten(2)
        if out.shape[1] > given:
            out = out[:, out.shape[1] - given :]
        result: torch.Tensor = self.out(out) if self.read else out
        return result

    def _projected(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values [B, n, width]; values in the place of what is not read."""
        if not self.read:
            return [x, x, x]
        both = functional.linear(x, self.in_weight, self.in_bias)
        if self.mixing == "gmlp":
            both = functional.gelu(both)
        found = dict(zip(self.read, torch.split(both, self.widths, -1), strict=True))
        return [found.get(name, found["v"]) for name in "qkv"]

    def _check(self, x: torch.Tensor) -> None:
        # whoever calls from outside may hand in anything
        given: object = x
        if not isinstance(given, torch.Tensor) or given.dtype not in FLOATS:
            kind = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
            raise TypeError(f"x must be a tensor of a floating type, got {kind}")
        if x.dim() != 3 or x.shape[2] != self.embed_dim:
            raise ValueError(f"x must be [B, n, {self.embed_dim}], got {list(x.shape)}")
        autocast = torch.is_autocast_enabled(x.device.type)
        if self.read and x.dtype != self.in_weight.dtype and not autocast:
            raise TypeError(f"x must be {self.in_weight.dtype} as the weights, got {x.dtype}")

    def _with_extra(
        self,
        x: torch.Tensor,
        padding: torch.Tensor | None,
        inputs: Mapping[str, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Mapping[str, torch.Tensor] | None]:
        """The tokens, their padding and inputs with the extra tokens before them."""
        attention: object = self.attention
        if not isinstance(attention, CompiledAttention):
            raise ValueError(
                f"`{self.attention.program.name}` has extra tokens, which stand before the whole"
                " sequence, and a rank has a shard of it: leave `extra_tokens` out, and put the"
                " tokens into x"
            )
        x = torch.cat([self.extra.to(x.dtype).expand(len(x), -1, -1), x], 1)
        return x, self._extended(padding, True), self._extended_inputs(inputs)

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


def _share(mine: CompiledAttention, other: CompiledAttention) -> None:
    """Puts the parameters of the other in the place of those that all layers share."""
    theirs = learned_parts(other.program)
    for entry, name in learned_parts(mine.program).items():
        if entry[1].layers and entry in theirs:
            mine.register_parameter(name, other.get_parameter(theirs[entry]))


def _turned(
    rotary: Rotary, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rotary` makes of queries and keys; raises unless it keeps their shapes."""
    # whoever writes a callable may return anything
    found: object = rotary(q, k, positions)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise TypeError(f"rotary must return q and k, got {type(found).__name__}")
    for name, one, other in zip("qk", found, (q, k), strict=True):
        if not isinstance(one, torch.Tensor) or one.shape != other.shape:
            what = list(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__
            raise ValueError(
                f"rotary must keep the shape of {name}, {list(other.shape)}, got {what}"
            )
    return found[0], found[1]
