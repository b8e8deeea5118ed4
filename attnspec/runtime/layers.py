"""Multi-head layers of one layer of a spec: `SelfAttention`, [B, n, embed_dim] in and out, and
`MultiheadAttention` in the place of torch's class."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Never, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from attnspec.backends.common.masks import added_by
from attnspec.backends.common.merging import joined, merged
from attnspec.backends.common.score_formula import widened
from attnspec.backends.common.torch_modes import is_transformed, is_watched
from attnspec.backends.planner import require_willing
from attnspec.ir.api_checks import length_of
from attnspec.ir.program import EXPRESSION, Attend, Leaf, Program, Score
from attnspec.ir.scalars import SCORE, Apply, Symbol
from attnspec.ir.serial import plan_data
from attnspec.limits import LIMITS
from attnspec.lower.lower import shares_keys
from attnspec.lower.mechanism_sizes import learned_parts, symbols_in
from attnspec.lower.work import MERGED
from attnspec.runtime.call_checks import (
    FLOATS,
    LATER,
    Inputs,
    Parts,
    check_dropout,
    check_layer,
    refuse_unknown,
)
from attnspec.runtime.module import CompiledAttention
from attnspec.runtime.streaming import StreamState

Rotary: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Turns q [B, H, n, d] and k [B, H_kv, n, d] by their positions, int64 [n]."""

DEVIATION = 0.02
"""Of the numbers that extra tokens start with."""

WHOLE = ("fourier", "mixer", "gmlp")
"""Mixings of the whole embedding, which know no heads."""

BEFORE = {"tokens": False, "ids": -1, "numbers": float("nan")}
"""What inputs of each kind are for extra tokens: in no set, of no id, without a number."""


class SelfAttention(nn.Module):
    """Self-attention as one layer of a spec describes it.

    Queries, keys and values are projections of the input, their heads go through the spec, and what
    comes out is projected back; what no head reads is not projected. The mixings that have no heads
    take the whole embedding as one: `fourier` and `mixer` without any projection, and `gmlp` as in
    its paper, `V s(GELU(U x))`. Neither the residual around the layer nor its norm belongs to it,
    but for those inside of the formula of `mixer`.

    The module holds what mechanisms of the layer learn, for each of `num_heads` heads, by default
    those that the spec declares, and the spec's extra tokens, which stand before every sequence and
    are left out of the output. `shared` is another layer of the spec, whose parameters this one
    takes where the spec shares them between all layers, `linformer(share = layer)`.

    With `num_kv_heads`, a divisor of `num_heads`, each head of keys and values serves as many heads
    of queries, which follow one another. `rotary(q, k, positions)` returns queries [B, H, n, d] and
    keys [B, H_kv, n, d] changed by their positions, int64 [n], in any way that keeps their shapes;
    extra tokens have the first positions.

    Raises ValueError or TypeError for arguments that do not fit.
    """

    def __init__(
        self,
        spec: Any,
        embed_dim: int,
        num_heads: int | None = None,
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
        core = _core(spec, embed_dim, num_heads, layer, backend)
        self.attention, self.layer, self._drawn_as, self.shared, width, self.num_heads = core
        self.embed_dim, self.dropout = width, check_dropout(dropout, "dropout")
        program = self.attention.program
        self.extra_tokens, mechanism = program.extra_tokens, program.attends[0].mechanism
        # the mixing without heads that the layer is, or nothing
        self.mixing = mechanism.name if program.heads is None and mechanism is not None else ""
        if shared is not None:
            theirs = learned_parts(shared.attention.program)
            for entry, name in learned_parts(program).items():
                if entry[1].layers and entry in theirs:
                    parameter = shared.attention.get_parameter(theirs[entry])
                    self.attention.register_parameter(name, parameter)
        self.read = _read_by(program)
        key_heads = self.num_heads if num_kv_heads is None else num_kv_heads
        self.num_kv_heads, self.rotary = length_of(key_heads, "num_kv_heads", 1), rotary
        self._check_options()
        keys = width // self.num_heads * self.num_kv_heads
        self.widths = [width if name == "q" else keys for name in self.read]
        if self.read:
            self.in_weight = nn.Parameter(torch.empty(sum(self.widths), width))
            self.in_bias = nn.Parameter(torch.empty(sum(self.widths))) if bias else None
            self.out = nn.Linear(width, width, bias=bias)
        if self.extra_tokens:
            self.extra = nn.Parameter(torch.empty(self.extra_tokens, width))
        self._start(None)

    def _check_options(self) -> None:
        """Raises unless the heads of keys divide those of queries, `rotary` is callable, and both
        are for layers that have queries and keys."""
        key_heads, rotary = self.num_kv_heads, cast(object, self.rotary)
        if self.num_heads % key_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got num_kv_heads = {key_heads} and num_heads"
                f" = {self.num_heads}"
            )
        if rotary is not None and not callable(rotary):
            raise TypeError(
                "rotary must be callable, rotary(q, k, positions) -> (q, k), got"
                f" {type(rotary).__name__}"
            )
        same, name = self.shared and "q" in self.read, self.attention.program.name
        one = "its `lsh` takes one tensor as queries and keys"
        why, two = (one, ", and rotary takes two") if same else ("it has no queries and keys", "")
        if key_heads < self.num_heads and (self.shared or self.read != "qkv"):
            raise ValueError(
                f"num_kv_heads cannot be used with `{name}`, got {key_heads}: {why}; leave"
                " num_kv_heads out"
            )
        if rotary is not None and not {"q", "k"} <= {*self.read}:
            raise ValueError(f"rotary cannot be used with `{name}`: {why}{two}; leave rotary out")

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Starts everything that is learned anew, drawn with the generator: projections as Glorot
        and Bengio's uniform numbers, without bias, mechanisms as their papers say."""
        self.attention.reset_parameters(generator)
        self._start(generator)

    def _start(self, generator: torch.Generator | None) -> None:
        if self.read:
            for weight in (*torch.split(self.in_weight, self.widths), self.out.weight):
                nn.init.xavier_uniform_(weight, generator=generator)
            for bias in (self.in_bias, self.out.bias):
                if bias is not None:
                    nn.init.zeros_(bias)
        if self.extra_tokens:
            nn.init.normal_(self.extra, std=DEVIATION, generator=generator)

    def extra_repr(self) -> str:
        heads, key_heads = self.num_heads, self.num_kv_heads
        grouped = f", num_kv_heads={key_heads}" if key_heads < heads else ""
        return f"embed_dim={self.embed_dim}, num_heads={heads}{grouped}, layer={self.layer}"

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        inputs: Inputs = None,
        **unknown: Never,
    ) -> Tensor:
        """Attention of x [B, n, embed_dim] with itself, of the same shape.

        `key_padding_mask` is bool [B, n], True for a real token; `inputs` are the tensors that the
        spec declares, for the n tokens of x. Extra tokens are real, in no set of tokens and of no
        id; lengths count from the first token of x and take the extra tokens in.
        """
        if unknown:
            refuse_unknown(self.attention.program, unknown, SelfAttention.forward)
        parts, rest = self._heads(x, 0, key_padding_mask, inputs)
        dropout_p = self.dropout if self.training else 0
        return self._joined(self.attention(*parts, dropout_p=dropout_p, **rest), x.shape[1])

    def step(
        self,
        x: Tensor,
        state: StreamState | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        inputs: Inputs = None,
        keep_all: bool = False,
        **unknown: Never,
    ) -> tuple[Tensor, StreamState]:
        """Goes on with a causal layer: the outputs of the next t tokens x [B, t, embed_dim], the
        rows of a call with the whole sequence, and the state after them. It is None at the start;
        `key_padding_mask` and `inputs` are those of the t tokens, `keep_all` lets the state grow.
        No weights are dropped.

        Raises ValueError as `CompiledAttention.step` does, and in training with a dropout.
        """
        if unknown:
            refuse_unknown(self.attention.program, unknown, SelfAttention.step)
        if self.training and self.dropout:
            raise ValueError("`step` applies no dropout: call eval() first")
        # what is no state is refused by the attention
        first = getattr(state, "position", 0)
        parts, rest = self._heads(x, first, key_padding_mask, inputs)
        out, after = self.attention.step(*parts, state, keep_all=keep_all, **rest)
        return self._joined(out, x.shape[1]), after

    def _heads(
        self, x: Tensor, first: int, padding: Tensor | None, inputs: Inputs
    ) -> tuple[Parts, dict[str, Any]]:
        """What the attention, or its step, takes: q [B, H, n, d], k and v [B, H_kv, n, d] from a
        position on, v for what is not read, and what there is besides."""
        weight = self.in_weight if self.read else None
        _check_tokens({"x": x}, [self.embed_dim], (3,), "[B, n, {0}]", weight)
        if self.extra_tokens and not first:
            x, padding, inputs = self._with_extra(x, padding, inputs)
        named = {"v": x}
        if self.read:
            both = functional.linear(x, self.in_weight, self.in_bias)
            both = functional.gelu(both) if self.mixing == "gmlp" else both
            named = dict(zip(self.read, torch.split(both, self.widths, -1), strict=True))
        counts = [1] * 3 if self.mixing else [self.num_heads] + 2 * [self.num_kv_heads]
        each = zip("qkv", counts, strict=True)
        q, k, v = (_split(named.get(name, named["v"]), count) for name, count in each)
        k = _with_shared(self.shared, q, k)
        if self.rotary is not None:
            positions = self.attention.positions(first, x.shape[1], x.device)
            turned: Any = self.rotary(q, k, positions)
            if not isinstance(turned, tuple | list) or len(turned) != 2:
                raise TypeError(f"rotary must return q and k, got {type(turned).__name__}")
            for name, one, x in zip("qk", turned, (q, k), strict=True):
                shape = list(one.shape) if isinstance(one, Tensor) else type(one).__name__
                if shape != (meant := list(x.shape)):
                    raise ValueError(f"rotary must keep the shape of {name}, {meant}, got {shape}")
            q, k = turned
        return (q, k, v), {"layer": self._drawn_as, "key_padding_mask": padding, "inputs": inputs}

    def _joined(self, out: Tensor, count: int) -> Tensor:
        """The heads' outputs [B, H, n, d] as [B, count, embed_dim], of the last tokens."""
        out = out[:, :, out.shape[2] - count :].transpose(1, 2).flatten(2)
        return cast(Tensor, self.out(out)) if self.read else out

    def _with_extra(
        self, x: Tensor, padding: Tensor | None, inputs: Inputs
    ) -> tuple[Tensor, Tensor | None, Inputs]:
        """The tokens, their padding and inputs with the extra tokens before them."""
        program, count = self.attention.program, self.extra_tokens
        if not isinstance(cast(object, self.attention), CompiledAttention):
            raise ValueError(
                f"`{program.name}` has extra tokens before the whole sequence, and a rank has only"
                " a shard: remove `extra_tokens` from the spec, and put the tokens into x"
            )
        x = torch.cat([self.extra.to(x.dtype).expand(len(x), -1, -1), x], 1)
        # what does not fit is left to the checks of the attention
        if isinstance(padding, Tensor) and padding.dim() == 2:
            padding = functional.pad(padding, (count, 0), value=True)
        longer = dict(inputs) if isinstance(inputs, Mapping) else {}
        for entry in program.inputs:
            name, kind = entry.name, entry.kind
            tensor = longer.get(name)
            if not isinstance(tensor, Tensor):
                continue
            if kind == "numbers" and not tensor.is_floating_point():
                raise TypeError(
                    f"the input `{name}` must be of a floating type, since extra tokens have"
                    f" no value and get NaN, got {tensor.dtype}"
                )
            if kind == "length":
                longer[name] = tensor + count
            elif tensor.dim() == 2:
                longer[name] = functional.pad(tensor, (count, 0), value=BEFORE.get(kind, -1))
        return x, padding, longer or inputs


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`, whose heads read the pairs of one layer of a spec.

    Arguments, parameters, state dict, layouts, masks and what is returned are those of torch's
    class, and with `attend full` so are all numbers; what mechanisms and scores of the spec learn
    stands below `attention.` in the state dict. A bool mask is True where a key is *not* read, as
    ever in that class. What differs: a query that reads no key gets zeros, not NaN, and a few
    things are refused, with the reason, that a spec gives no meaning to.

    Raises ValueError or TypeError for arguments that do not fit the spec.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        spec: Any,
        layer: int = 0,
        backend: str = "auto",
    ) -> None:
        core = _core(spec, embed_dim, num_heads, layer, backend, two=True)
        attention, checked, drawn_as, shared, width, heads = core
        _check_attends(attention.program, add_bias_kv, add_zero_attn)
        more = add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        super().__init__(width, heads, check_dropout(dropout, "dropout"), bias, *more)
        # torch's own encoder layers run a kernel of theirs on the weights of a module for which
        # this is true, and its forward, with the spec, never
        self._qkv_same_embed_dim = False
        self.attention = attention.to(device=device, dtype=dtype)
        self.layer, self._drawn_as, self.shared = checked, drawn_as, shared
        self.one_sequence, program = "", attention.program
        placed = any(x.name != "softcap" for each in program.attends for x in each.scores)
        some = any(each.mechanism or each.graph != Leaf("full", ()) for each in program.attends)
        # where every pair is read with scores that read no positions, queries may be any
        if not program.cross and (program.causal or some or placed):
            self.one_sequence = (
                f"`{program.name}` is for one sequence, and query and key are different tensors:"
                " pass the same tensor for both (a view is fine, a copy is not), or for two"
                " sequences write `cross` in the spec"
            )

    def _reset_parameters(self) -> None:
        # which weights there are says it, whatever fast paths are told
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        inputs: Inputs = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the weights with `need_weights`, as torch's class returns them.

        query [L, B, E], key [S, B, kdim] and value [S, B, vdim], with `batch_first` [B, L, E] and
        so on, or without B; key_padding_mask [B, S], attn_mask [L, S] or [B · heads, L, S], both
        bool, True = not read, or numbers that are added to scores. `inputs` are the tensors that
        the spec declares, as `CompiledAttention` takes them, always with B.

        Query and key are one sequence, the same tensor, unless the spec reads every pair.
        `attn_mask` takes pairs away from the spec's: with it every pair is computed. With the hint
        `is_causal` it is not examined where the spec is causal. Numbers in key_padding_mask other
        than 0 and -inf are added to scores in the same way. Weights are returned for up to
        `LIMITS.pairs_shown` keys.
        """
        named, widths = {"query": query, "key": key, "value": value}, [self.embed_dim]
        form = "[n, {0}] or [B, n, {0}]" if self.batch_first else "[n, {0}] or [n, B, {0}]"
        _check_tokens(named, [*widths, self.kdim, self.vdim], (2, 3), form, self.out_proj.weight)
        if self.one_sequence and not _is_same(query, key):
            raise ValueError(self.one_sequence)
        own = isinstance(cast(object, self.attention), CompiledAttention)
        if not own and (need_weights or attn_mask is not None):
            raise ValueError(
                "a rank has a shard of the sequence, without weights or attn_mask of all pairs:"
                " call the layer with need_weights=False, and describe the mask in the spec"
            )
        q, k, v = self._heads(query, key, value)
        if need_weights and k.shape[2] > LIMITS.pairs_shown:
            raise ValueError(
                f"weights are returned for up to {LIMITS.pairs_shown:,} keys, got {k.shape[2]:,}:"
                " pass need_weights=False for the output without weights"
            )
        real, added = self._masks(attn_mask, is_causal, key_padding_mask, q, k)
        extra, values = self._extra_keys(q, v)
        read, weights = values, None
        if need_weights:
            # of the identity, with a column where there are no keys, outputs are the weights
            count = values.shape[2]
            one = torch.eye(count, max(1, count), dtype=values.dtype, device=values.device)
            read = one.expand(*values.shape[:2], -1, -1)
        out = self._attended(q, k, read, extra, real, added, inputs)
        if need_weights:
            weights = out[..., : values.shape[2]]
            out = weights @ values
            weights = weights.mean(1) if average_attn_weights else weights
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if query.dim() == 2:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _masks(
        self,
        attn_mask: Tensor | None,
        is_causal: bool,
        key_padding_mask: Tensor | None,
        q: Tensor,
        k: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Which keys are real, and what is added to scores, as torch's class is called."""
        (batch, heads, n_q, _), n_k, real, added = q.shape, k.shape[2], None, None
        causal = self.attention.program.causal
        if is_causal and attn_mask is None and not causal:
            raise ValueError(
                "is_causal needs attn_mask, which is not given: write `causal` in the spec, or pass"
                " the mask"
            )
        if attn_mask is not None and not (is_causal and causal):
            _check_mask("attn_mask", attn_mask, [n_q, n_k], [batch * heads, n_q, n_k])
            each = (batch, heads) if attn_mask.dim() == 3 else (1, 1)
            added = attn_mask.reshape(*each, n_q, n_k)
            added = added_by(~added, q.dtype) if added.dtype == torch.bool else added
        if key_padding_mask is not None:
            shapes = [[batch, n_k], *[[n_k]] * (batch == 1)]
            _check_mask("key_padding_mask", key_padding_mask, *shapes)
            mask = key_padding_mask.view(batch, n_k)
            if mask.dtype == torch.bool:
                return ~mask, added
            real = mask > -torch.inf
            plain = ((mask == 0) | ~real).all()
            if is_watched(q):
                why = "in a traced program key_padding_mask must hold only 0 and -inf"
                torch._assert_async(plain, why)
            elif not plain:
                more = mask[:, None, None]
                added = more if added is None else added + more
        return real, added

    def _heads(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """q, k and v [B, H, n, d] of query, key and value."""
        # None where queries, keys and values are of different widths
        both: Tensor | None = self.in_proj_weight
        each = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        weights = each if both is None else both.chunk(3)
        bias: Tensor | None = self.in_proj_bias
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        heads = []
        for x, weight, bias in zip(parts, weights, biases, strict=True):
            x = functional.linear(x, weight, bias)
            x = x[None] if x.dim() == 2 else x if self.batch_first else x.transpose(0, 1)
            heads.append(_split(x, self.num_heads))
        q, k, v = heads
        return q, _with_shared(self.shared, q, k), v

    def _extra_keys(self, q: Tensor, v: Tensor) -> tuple[Tensor | None, Tensor]:
        """Scores [B, H, n_q, e] of the learned and the zero key, if any, and values with theirs."""
        if self.bias_k is None and not self.add_zero_attn:
            return None, v
        none = q.new_zeros(1, self.num_heads, int(self.add_zero_attn), self.head_dim)
        keys, values = (
            none if x is None else torch.cat([_split(x, self.num_heads).to(q.dtype), none], 2)
            for x in (self.bias_k, self.bias_v)
        )
        scores = q @ keys.transpose(-1, -2) / math.sqrt(self.head_dim)
        return scores, torch.cat([v, values.expand(len(v), -1, -1, -1)], 2)

    def _attended(
        self,
        q: Tensor,
        k: Tensor,
        values: Tensor,
        extra: Tensor | None,
        real: Tensor | None,
        added: Tensor | None,
        inputs: Inputs,
    ) -> Tensor:
        """The output [B, H, n_q, e] for the values of the keys and of extra ones behind; more
        queries than keys, where every pair is read, as many at a time as there are keys."""
        run, n_q, n_k, every = self.attention, q.shape[2], k.shape[2], dict(inputs or {})
        dropout_p = self.dropout if self.training else 0
        rest: Any = {"key_padding_mask": real, "dropout_p": dropout_p, "layer": self._drawn_as}
        size = n_k if 0 < n_k < n_q and not run.program.cross else max(1, n_q)
        rows = torch.split(q, size, 2)
        reads = [every] * len(rows)
        if added is not None:
            if is_watched(q) and not is_transformed():
                raise ValueError(
                    "attn_mask cannot be used in a traced program: describe the mask in the spec,"
                    " by patterns or inputs"
                )
            for formula in run.program.mechanisms:
                raise ValueError(
                    f"attn_mask cannot be used with `{formula.name}`, which has no scores: leave"
                    f" attn_mask out, or write a graph in the spec in place of `{formula.name}`"
                )
            run, name = run.with_input("pairs", _masked)
            masks = torch.split(added.expand(len(q), -1, n_q, n_k), size, 2)
            reads = [{**every, name: mask} for mask in masks]
        rest["return_lse"] = extra is not None
        pairs = zip(rows, reads, strict=True)
        outs = [run(x, k, values[:, :, :n_k], inputs=read, **rest) for x, read in pairs]
        if extra is None:
            return joined(outs, 2)
        scores = widened(extra)
        weights = functional.dropout(functional.softmax(scores, -1), dropout_p)
        more = weights.to(values.dtype) @ values[:, :, n_k:], torch.logsumexp(scores, -1)
        out, lse = (torch.cat(part, 2) for part in zip(*outs, strict=True))
        return merged((out, lse), more)[0]


def _masked(attend: Attend, name: str) -> Attend:
    """The same with numbers added to its scores."""
    total = Apply("+", (Symbol(SCORE), Symbol(f"{name}(q, k)")))
    return replace(attend, scores=(*attend.scores, Score(EXPRESSION, (("value", total),))))


def _is_same(query: Tensor, key: Tensor) -> bool:
    """Whether both are one tensor, or views of the same numbers in the same order."""
    # what is traced or transformed has no memory to go by
    if query is key or torch.compiler.is_compiling() or is_watched(query) or is_transformed():
        return query is key
    alike = query.shape == key.shape and query.stride() == key.stride()
    return alike and query.device == key.device and query.data_ptr() == key.data_ptr() != 0


def _check_mask(name: str, mask: Tensor, *shapes: list[int]) -> None:
    """Raises unless a mask has one of some shapes, and is bool or of numbers."""
    if list(mask.shape) not in shapes:
        some = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have the shape {some}, got {list(mask.shape)}")
    if mask.dtype not in (torch.bool, *FLOATS):
        raise TypeError(f"{name} must be bool or of a floating type, got {mask.dtype}")


def _check_attends(program: Program, learned: bool, zero: bool) -> None:
    """Raises unless heads weigh values by queries and keys, and those of extra keys beside them."""
    name = "add_bias_kv" if learned else "add_zero_attn"
    for attend in program.attends:
        formula = attend.mechanism and attend.mechanism.name
        if formula in WHOLE:
            raise ValueError(
                f"`{formula}` mixes tokens without queries and keys: use `attnspec.SelfAttention`"
            )
        if (learned or zero) and (formula or attend.normalize not in MERGED):
            what = formula or f"normalize {attend.normalize}"
            raise ValueError(
                f"{name} adds a key to a softmax, and the spec has `{what}`: leave {name} out"
                f"{'' if learned or formula else '; `normalize softmax1` has such a key'}"
            )
        if learned and (attend.scores or attend.scale is not None):
            raise ValueError(
                "add_bias_kv adds a key without a position, to which the `score` or `scale` of"
                " the spec cannot be applied: leave add_bias_kv out, or remove `score` and"
                " `scale` from the spec"
            )
    if program.extra_tokens:
        raise ValueError(
            f"`{program.name}` has extra tokens, for which torch's class has no parameters: use"
            " `attnspec.SelfAttention`"
        )


def _core(
    spec: Any, embed_dim: int, num_heads: int | None, layer: int, backend: str, two: bool = False
) -> tuple[CompiledAttention, int, int, tuple[int, ...], int, int]:
    """The attention of one layer of a spec, the layer, the number it is called by, the heads whose
    keys are their queries, the width and the heads; raises unless these fit, `cross` for `two`"""
    # whoever calls from outside may hand in anything
    program: object = getattr(spec, "program", None)
    if not isinstance(program, Program):
        raise TypeError(
            f"the first argument must be a Spec, got {type(spec).__name__}: `attnspec.load(path)`"
            " reads one from a file, `attnspec.parse(text)` from a text"
        )
    count = program.heads if num_heads is None else num_heads
    if count is None:
        raise TypeError(
            f"num_heads must be given, since `{program.name}` declares no heads: attnspec."
            "SelfAttention(spec, embed_dim, num_heads)"
        )
    width = length_of(embed_dim, "embed_dim", 1)
    heads = length_of(count, "num_heads", 1)
    if width % heads:
        raise ValueError(
            f"num_heads must divide embed_dim, got num_heads = {heads} and embed_dim = {width}"
        )
    if program.heads not in (None, heads):
        raise ValueError(
            f"num_heads must be {program.heads}, the heads of `{program.name}`, got {heads};"
            f" {LATER}"
        )
    layer = check_layer(program, layer)
    require_willing(program, backend)
    if program.cross and not two:
        raise ValueError(
            f"`{program.name}` has `cross`, and a layer of self-attention has one sequence: use"
            " `attnspec.MultiheadAttention`"
        )
    program = of_layer(program, layer, heads)
    size = width if program.heads is None else width // heads
    attention = CompiledAttention(plan_data(program, backend), size)
    heads_of = enumerate(program.attends_of())
    shared = tuple(head for head, attend in heads_of if shares_keys(attend.graph))
    # layers that compute the same are one to what traces them
    return attention, layer, attention.engine.binder.alike(layer), shared, width, heads


def _with_shared(shared: tuple[int, ...], q: Tensor, k: Tensor) -> Tensor:
    """The keys [B, H, n, d] with queries in their place for the heads that share them."""
    if not shared:
        return k
    same = torch.tensor([head in shared for head in range(k.shape[1])], device=k.device)
    return torch.where(same[:, None, None], q, k)


def _split(x: Tensor, heads: int) -> Tensor:
    """[B, n, H d] as [B, H, n, d]."""
    return torch.unflatten(x, 2, (heads, -1)).transpose(1, 2)


def _check_tokens(
    named: Mapping[str, Any],
    widths: Sequence[int],
    axes: tuple[int, ...],
    form: str,
    weight: Tensor | None,
) -> None:
    """Raises unless tokens are dense floats of the axes and the widths of a form, and of the type
    of the weights, if there are any."""
    for (name, x), width in zip(named.items(), widths, strict=True):
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        if kind not in FLOATS:
            raise TypeError(f"{name} must be a tensor of a floating type, got {kind}")
        if x.is_nested:
            raise TypeError(
                f"{name} must be a dense tensor, got a nested one: build torch's encoder with"
                " enable_nested_tensor=False; `attnspec.packed` takes packed documents"
            )
        if x.dim() not in axes or x.shape[-1] != width:
            raise ValueError(f"{name} must be {form.format(width)}, got {list(x.shape)}")
        if weight is not None and kind != weight.dtype:
            if not torch.is_autocast_enabled(x.device.type):
                raise TypeError(
                    f"{name} must be {weight.dtype}, the dtype of the weights, got {kind}"
                )
    if len({x.dim() for x in named.values()}) > 1:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in named.items())
        raise ValueError(f"{', '.join(named)} must have the same number of axes, got {shapes}")


def of_layer(program: Program, layer: int, heads: int) -> Program:
    """The program of one layer alone, for a number of heads or for one mixing without heads; it is
    called for the same `layer`, so that random graphs stay those of the layer."""
    row = program.row(layer)
    attend, count = program.attend(layer), cast("int | None", heads)
    mechanism = attend.mechanism if attend.graph is None and len(set(row)) == 1 else None
    if mechanism is not None and mechanism.name in WHOLE and "head" not in symbols_in(mechanism):
        row, count = row[:1], None
    else:
        row = (row * heads)[:heads]
    kept = sorted(set(row))
    attends = tuple(program.attends[slot] for slot in kept)
    slots = (tuple(map(kept.index, row)),)
    return replace(program, attends=attends, slots=slots, layers=None, heads=count)


def _read_by(program: Program) -> str:
    """Which of q, k and v the heads of a layer read."""
    read = set[str]()
    for attend in program.attends:
        mechanism, reads = attend.mechanism, "qv" if shares_keys(attend.graph) else "qkv"
        if mechanism is not None and attend.graph is None:
            arguments = dict(mechanism.arguments)
            if mechanism.name in WHOLE:
                reads = "qv" if mechanism.name == "gmlp" else "v" if program.heads else ""
            elif mechanism.name == "synthesizer" and not arguments.get("products", False):
                reads = "qv" if "dense" in str(arguments.get("kind", "dense")) else "v"
        read.update(reads)
    return "".join(sorted(read, key="qkv".index))
