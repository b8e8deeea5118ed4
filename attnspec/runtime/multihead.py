"""`torch.nn.MultiheadAttention` with the pairs of a spec."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from attnspec.backends.common.merging import merged
from attnspec.backends.common.torch_modes import is_transformed, is_watched
from attnspec.backends.planner import require_willing
from attnspec.ir.program import Leaf, Program
from attnspec.ir.serial import plan_data
from attnspec.limits import LIMITS
from attnspec.lower.work import MERGED
from attnspec.runtime.call_checks import FLOATS, check_dropout, check_layer
from attnspec.runtime.module import CompiledAttention
from attnspec.runtime.one_layer import (
    WHOLE,
    HasProgram,
    of_layer,
    program_of,
    shared_heads,
    sizes_of,
    with_shared_keys,
)


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`, whose heads read the pairs of one layer of a spec.

    Arguments, parameters, state dict, layouts, masks and what is returned are those of torch's
    class, and with `attend full` so are all numbers; what mechanisms and scores of the spec learn
    stands below `attention.` in the state dict. A bool mask is True where a key is *not* read, as
    ever in that class. What differs: a query that reads no key gets zeros, not NaN, and a few
    things are refused, with the reason, that a spec gives no meaning to.

    >>> import attnspec, torch
    >>> spec = attnspec.parse("attention near { attend window(radius = 2) }")
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> layer.self_attn = attnspec.MultiheadAttention(32, 4, batch_first=True, spec=spec)
    >>> encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> encoder(torch.randn(1, 10, 32)).shape
    torch.Size([1, 10, 32])

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
        spec: HasProgram,
        layer: int = 0,
        backend: str = "auto",
    ) -> None:
        program = program_of(spec)
        embed_dim, num_heads = sizes_of(program, embed_dim, num_heads)
        layer = check_layer(program, layer)
        require_willing(program, backend)
        alone = of_layer(program, layer, num_heads, two=True)
        _check_has_heads(alone)
        if add_bias_kv or add_zero_attn:
            _check_extra_keys(alone, add_bias_kv)
        super().__init__(
            embed_dim,
            num_heads,
            check_dropout(dropout),
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        # torch's own encoder layers run a kernel of theirs on the weights of a module for which
        # this is true, and its forward, with the spec, never
        self._qkv_same_embed_dim = False
        self.layer = layer
        self.attention = CompiledAttention(plan_data(alone, backend), embed_dim // num_heads)
        # layers that compute the same are one to what traces them
        self._drawn_as = self.attention.engine.binder.alike(layer)
        self.attention.to(device=device, dtype=dtype)
        self.shared = shared_heads(alone)
        self.one_sequence = _why_one_sequence(alone)

    def _reset_parameters(self) -> None:
        # which weights there are says it, whatever fast paths are told
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output, and the weights with `need_weights`, as torch's class returns them.

        query [L, B, E], key [S, B, kdim] and value [S, B, vdim], with `batch_first` [B, L, E] and
        so on, or without B; key_padding_mask [B, S], attn_mask [L, S] or [B · heads, L, S], both
        bool, True = not read, or numbers that are added to scores. `inputs` are the tensors that
        the spec declares, as `CompiledAttention` takes them, always with B.

        Query and key are one sequence, the same tensor, unless the spec reads every pair.
        `attn_mask` takes pairs away from the spec's: with it every pair is computed. With the hint
        `is_causal` it is not looked at where the spec is causal. Numbers in key_padding_mask other
        than 0 and -inf are added to scores in the same way. Weights are returned for up to
        `LIMITS.pairs_shown` keys.
        """
        _check_tokens(query, key, value)
        self._check_widths(query, key, value)
        if self.one_sequence and not _is_same(query, key):
            raise ValueError(self.one_sequence)
        self._check_shards(need_weights, attn_mask)
        q, k, v = self._heads(query, key, value)
        if need_weights and k.shape[2] > LIMITS.pairs_shown:
            raise ValueError(
                f"weights are returned for up to {LIMITS.pairs_shown:,} keys, got {k.shape[2]:,}:"
                " need_weights=False returns the output alone"
            )
        real, added = self._masks(attn_mask, is_causal, key_padding_mask, q, k)
        extra = self._extra_keys(q)
        values = v if extra is None else torch.cat([v, extra[1].expand(len(v), -1, -1, -1)], 2)
        # an output is its weights times the values, and so are they, of those of the identity
        seen = _identity(values) if need_weights else values
        out = self._attended(q, k, seen, extra, real, added, inputs)
        weights = None
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
        attn_mask: torch.Tensor | None,
        is_causal: bool,
        key_padding_mask: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which keys are real, and what is added to scores, as torch's class is told them."""
        if is_causal and attn_mask is None and not self.attention.program.causal:
            raise ValueError(
                "is_causal is a hint about attn_mask, which is not given: write `causal` in the"
                " spec, or give the mask"
            )
        hinted = is_causal and self.attention.program.causal
        added = None if hinted or attn_mask is None else _added(attn_mask, q, k)
        real, more = _padding(key_padding_mask, q, k)
        if more is not None:
            added = more if added is None else added + more
        return real, added

    def _check_shards(self, need_weights: bool, attn_mask: object) -> None:
        """Raises where the attention runs over ranks, and what is about all pairs is asked for."""
        attention: object = self.attention
        if isinstance(attention, CompiledAttention) or (not need_weights and attn_mask is None):
            return
        raise ValueError(
            "a rank has a shard of the sequence, and neither weights nor attn_mask of all pairs:"
            " call it with need_weights=False, and say in the spec what the mask says"
        )

    def _check_widths(self, *given: torch.Tensor) -> None:
        """Raises unless query, key and value are of the widths and the type of the weights."""
        widths = [self.embed_dim, self.kdim, self.vdim]
        if [x.shape[-1] for x in given] != widths:
            shapes = [list(x.shape) for x in given]
            raise ValueError(f"query, key and value must end in {widths}, got the shapes {shapes}")
        dtype = self.out_proj.weight.dtype
        types = [str(x.dtype) for x in given]
        autocast = torch.is_autocast_enabled(given[0].device.type)
        if set(types) != {str(dtype)} and not autocast:
            raise TypeError(
                f"query, key and value must be {dtype} as the weights, got {', '.join(types)}"
            )

    def _heads(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and v [B, H, n, d] of query, key and value."""
        # None where queries, keys and values are of different widths
        both: torch.Tensor | None = self.in_proj_weight
        weights = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if both is None
            else both.chunk(3)
        )
        bias: torch.Tensor | None = self.in_proj_bias
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        found = []
        for x, weight, bias in zip(given, weights, biases, strict=True):
            x = functional.linear(x, weight, bias)
            if x.dim() == 2:
                x = x[None]
            elif not self.batch_first:
                x = x.transpose(0, 1)
            found.append(self._of_heads(x))
        q, k, v = found
        return q, with_shared_keys(q, k, self.shared), v

    def _of_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[B, n, E] as [B, H, n, d]."""
        return torch.unflatten(x, 2, (self.num_heads, -1)).transpose(1, 2)

    def _extra_keys(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The scores [B, H, n_q, e] and the values [1, H, e, d] of the learned key and the zero
        key, which every query reads beside those of the spec; None where there are none."""
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        if self.bias_k is not None and self.bias_v is not None:
            for learned, into in ((self.bias_k, keys), (self.bias_v, values)):
                into.append(self._of_heads(learned).to(q.dtype))
        if self.add_zero_attn:
            for into in (keys, values):
                into.append(q.new_zeros(1, self.num_heads, 1, self.head_dim))
        if not keys:
            return None
        scores = q @ torch.cat(keys, 2).transpose(-1, -2) / math.sqrt(self.head_dim)
        return scores, torch.cat(values, 2)

    def _attended(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        seen: torch.Tensor,
        extra: tuple[torch.Tensor, torch.Tensor] | None,
        real: torch.Tensor | None,
        added: torch.Tensor | None,
        inputs: Mapping[str, torch.Tensor] | None,
    ) -> torch.Tensor:
        """The output [B, H, n_q, e] for the values `seen` of the keys, and of extra ones behind."""
        n_k, dropout = k.shape[2], self.dropout if self.training else 0.0
        rest: dict[str, Any] = {
            "layer": self._drawn_as,
            "key_padding_mask": real,
            "dropout_p": dropout,
            "inputs": inputs,
            "return_lse": extra is not None,
        }
        v = seen[:, :, :n_k]
        found = self._in_turn(q, k, v, added, rest)
        if extra is None:
            return cast(torch.Tensor, found)
        scores = extra[0].to(found[1].dtype)
        weights = functional.dropout(functional.softmax(scores, -1), dropout).to(seen.dtype)
        more = weights @ seen[:, :, n_k:], torch.logsumexp(scores, -1)
        return merged(found, more)[0]

    def _in_turn(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        added: torch.Tensor | None,
        rest: dict[str, Any],
    ) -> Any:
        """What the spec's attention returns; more queries than keys, which every pair that is read
        allows, come as many at a time as there are keys."""
        n_q, n_k = q.shape[2], k.shape[2]
        if n_q > n_k > 0 and not self.attention.program.cross:
            each = torch.split(q, n_k, 2)
            rows: Sequence[torch.Tensor | None] = [None] * len(each)
            if added is not None:
                rows = torch.split(added.expand(-1, -1, n_q, -1), n_k, 2)
            found = [self._in_turn(x, k, v, y, rest) for x, y in zip(each, rows, strict=True)]
            if not rest["return_lse"]:
                return torch.cat(found, 2)
            return tuple(torch.cat(part, 2) for part in zip(*found, strict=True))
        if added is None:
            return self.attention(q, k, v, **rest)
        return self.attention.masked(q, k, v, added, **rest)


def _identity(values: torch.Tensor) -> torch.Tensor:
    """The identity [B, H, n, n] in the place of values [B, H, n, d], with a column for no keys."""
    count = values.shape[2]
    one = torch.eye(count, max(1, count), dtype=values.dtype, device=values.device)
    return one.expand(*values.shape[:2], -1, -1)


def _is_same(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether both are one tensor, or views of the same numbers in the same order."""
    if query is key:
        return True
    if torch.compiler.is_compiling() or is_watched(query) or is_transformed():
        # what is traced or transformed has no memory to go by
        return False
    alike = query.shape == key.shape and query.stride() == key.stride()
    return alike and query.device == key.device and query.data_ptr() == key.data_ptr() != 0


def _check_tokens(*given: torch.Tensor) -> None:
    """Raises unless query, key and value are dense tensors of floats of two or three axes."""
    for name, x in zip(("query", "key", "value"), given, strict=True):
        # whoever calls from outside may hand in anything
        each: object = x
        if not isinstance(each, torch.Tensor) or each.dtype not in FLOATS:
            kind = each.dtype if isinstance(each, torch.Tensor) else type(each).__name__
            raise TypeError(f"{name} must be a tensor of a floating type, got {kind}")
        if each.is_nested:
            raise TypeError(
                f"{name} must be a dense tensor, got a nested one: build torch's encoder with"
                " enable_nested_tensor=False; `attnspec.packed` takes packed documents"
            )
    shapes = [list(x.shape) for x in given]
    if {len(shape) for shape in shapes} not in ({2}, {3}):
        raise ValueError(f"query, key and value must have two axes each, or three, got {shapes}")


def _added(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """What `attn_mask` adds to the scores, [1 or B, 1 or H, n_q, n_k]."""
    batch, heads, n_q, _ = q.shape
    n_k, shape = k.shape[2], list(mask.shape)
    if shape not in ([n_q, n_k], [batch * heads, n_q, n_k]):
        raise ValueError(
            f"attn_mask must have the shape {[n_q, n_k]} or {[batch * heads, n_q, n_k]},"
            f" got {shape}"
        )
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)
    elif mask.dtype not in FLOATS:
        raise TypeError(f"attn_mask must be bool or of a floating type, got {mask.dtype}")
    return mask[None, None] if mask.dim() == 2 else torch.unflatten(mask, 0, (batch, heads))


def _padding(
    mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Which keys are real, bool [B, n_k], and what is added to their scores [B, 1, 1, n_k], None
    where there is nothing."""
    if mask is None:
        return None, None
    shape = [len(q), k.shape[2]]
    if list(mask.shape) not in (shape, shape[1:] if len(q) == 1 else shape):
        raise ValueError(f"key_padding_mask must have the shape {shape}, got {list(mask.shape)}")
    mask = mask.view(shape)
    if mask.dtype == torch.bool:
        return ~mask, None
    if mask.dtype not in FLOATS:
        raise TypeError(f"key_padding_mask must be bool or of a floating type, got {mask.dtype}")
    real = mask > -torch.inf
    plain = ((mask == 0) | ~real).all()
    if is_watched(q):
        # a traced program has no numbers to go by
        torch._assert_async(
            plain, "in a traced program key_padding_mask must hold 0 and -inf alone"
        )
        return real, None
    return real, None if plain else mask[:, None, None]


def _check_has_heads(program: Program) -> None:
    """Raises unless every head weighs values by queries and keys, and nothing else is learned."""
    for attend in program.attends:
        if attend.mechanism is not None and attend.mechanism.name in WHOLE:
            raise ValueError(
                f"`{attend.mechanism.name}` mixes tokens without queries and keys:"
                " `attnspec.SelfAttention` takes it"
            )
    if program.extra_tokens:
        raise ValueError(
            f"`{program.name}` has extra tokens, for which torch's class has no parameters:"
            " `attnspec.SelfAttention` takes it"
        )


def _check_extra_keys(program: Program, learned: bool) -> None:
    """Raises where a key without a position has no weight beside those of the spec."""
    name = "add_bias_kv" if learned else "add_zero_attn"
    for attend in program.attends:
        if attend.mechanism is not None or attend.normalize not in MERGED:
            what = attend.mechanism.name if attend.mechanism else f"normalize {attend.normalize}"
            raise ValueError(
                f"{name} adds a key to a softmax, and `{what}` is none: leave it out; `normalize"
                " softmax1` has a zero logit"
            )
        if learned and (attend.scores or attend.scale is not None):
            raise ValueError(
                "add_bias_kv adds a key without a position, whose score the spec's `score` or"
                " `scale` does not tell: leave it out, or leave them out"
            )


def _why_one_sequence(program: Program) -> str:
    """Why the queries must be those of the keys' own sequence; "" where they may be another's: the
    spec says so, or every pair is read with scores that know no positions."""
    for attend in () if program.cross else program.attends:
        placed = any(score.name != "softcap" for score in attend.scores)
        some = attend.mechanism is not None or attend.graph != Leaf("full", ())
        if program.causal or some or placed:
            return (
                f"`{program.name}` says which positions of one sequence read each other, and query"
                " is not key: give the same tensor as both, or views of the same numbers (equal"
                " numbers in another place are not looked at), or a spec of two sequences, `cross`"
            )
    return ""
