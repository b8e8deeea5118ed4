"""What a transformers model knows about padding and positions, for the attention function.

transformers tells the mask function where the queries stand and hands its answer, of any type, to
the attention function, which is told nothing else. So the answer here holds those facts and no
mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor

from attnspec.backends.common.torch_modes import is_recorded
from attnspec.ir.program import Input, Program
from attnspec.runtime.call_checks import along_positions
from attnspec.text.diagnostics import AttnSpecError
from attnspec.version import is_older

IndexMask = Callable[..., Any]
"""transformers' mask functions: (batch, head, query, key) -> whether the pair is allowed."""

_KINDS = {
    "packed_sequence_mask_function": "packed",
    "chunked_overlay": "chunked",
    "blockwise_overlay": "blockwise",
    "sliding_window_overlay": "sliding",
    "sliding_window_bidirectional_overlay": "sliding",
}
"""The functions of transformers that make a part of a mask, and what the whole is called then."""

REPLACED = ("chunked", "sliding")
"""Those of them that are patterns of one sequence, which a spec may replace."""

WIDENED = ("blockwise", "custom")
"""Those that read later positions, of images or prompts, in models that read both ways."""

CACHED = "attnspec_cached"
"""Where keys that a `SpecCache` handed on keep what they are to be joined with."""

INDEXED = "indexed_attention"
"""The type of a layer that chooses keys by itself."""


@dataclass(frozen=True)
class ModelMask:
    """Where the queries and keys of one forward pass stand, and which keys are real.

    Queries are at `q_offset` … `end - 1`, the first key at `kv_offset`; keys from `end` on are
    slots of a cache that nothing was written to yet. `padding` is bool [B, end], True = real, or
    None where all are; `left_padded` says that some sample begins with padding, `parted` that some
    has padding between its tokens. `kind` is the
    pattern that the model itself would use: "causal", "bidirectional", "sliding", "chunked",
    "blockwise", "packed" or "custom"; `past` says that it reads no later position. `arguments` are
    those that the mask was asked for with.

    A traced program has no numbers. For it `offset` [] is where the queries of a static cache
    stand, and `slots` bool [B, kv_length] which of its slots hold real keys, None where none is
    padding; `single` [] is whether each sample is one document.
    """

    kind: str
    q_length: int
    q_offset: int
    kv_length: int
    kv_offset: int
    padding: Tensor | None
    left_padded: bool = False
    parted: bool = False
    past: bool = False
    arguments: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)
    offset: Tensor | None = None
    slots: Tensor | None = None
    single: Tensor | None = None

    def of_own(self, name: str) -> object:
        """The mask that an attention of transformers takes, for a layer that keeps it; "eager" and
        the like by their names."""
        make = import_module("transformers").AttentionMaskInterface()[name]
        return make(**{**self.arguments, "allow_is_causal_skip": False})

    def of_slots(self) -> ModelMask:
        """The facts in a traced program: the keys of a static cache are all its slots, of which
        those up to `offset` count."""
        if self.offset is None:
            return self
        first = self.kv_length - self.q_length
        # the arguments say where the queries of this step stand, and a trace is for every step
        return replace(self, q_offset=first, padding=self.slots, left_padded=False, arguments={})

    @property
    def end(self) -> int:
        """The number of positions up to the last query."""
        return self.q_offset + self.q_length

    # `generate` makes the mask of a static cache before it calls the model, and treats what it gets
    # as a tensor in these two ways; the model then hands it to `model_mask` once more

    @property
    def ndim(self) -> int:
        """4, as of a mask that is ready for use."""
        return 4

    def contiguous(self) -> ModelMask:
        """The mask itself."""
        return self

    # whatever else is done to a tensor is done by a layer that computes attention itself

    @classmethod
    def __torch_function__(cls, function: object, *_arguments: object) -> NoReturn:
        raise _no_tensor(f"`{getattr(function, '__name__', function)}`")

    def __getitem__(self, _index: object) -> NoReturn:
        raise _no_tensor("a slice")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise _no_tensor(f"`{name}`")


class NoTensorError(AttnSpecError, AttributeError):
    """A layer takes what was left for the attention function for a mask of its own."""


def _no_tensor(used: str) -> NoTensorError:
    return NoTensorError(
        f"this layer computes attention in its own code and needs {used} of a mask, which a spec"
        " does not make: load the model with its own attention (`used_by` shows which layers could"
        " use a spec)"
    )


def model_mask(**asked: Any) -> ModelMask | Tensor:
    """The mask function that is registered with every spec; its arguments are transformers' own.

    Of these `q_length`, `kv_length`, `mask_function`, `q_offset`, `kv_offset`, `attention_mask` and
    `config` are read; others (dtype, device, whether a mask may be skipped, …) concern the shape of
    a dense mask. Layers with an indexer choose keys by it: models that have some get one, which
    knows these facts.
    """
    asked = {"q_offset": 0, "kv_offset": 0, "attention_mask": None, "config": None, **asked}
    attention_mask, at = asked["attention_mask"], asked["q_offset"]
    if isinstance(attention_mask, ModelMask):
        return attention_mask
    indexed = INDEXED in (getattr(asked["config"], "layer_types", None) or ())
    if is_recorded(attention_mask):
        if indexed:
            raise AttnSpecError(
                "layers that choose keys need the values of tensors, which a traced program does"
                " not have: call the model without tracing"
            )
        return _traced(asked)
    # with a static cache this is a view of a counter that moves on before the attention runs
    offset, kind, q_length = int(at), kind_of(asked["mask_function"]), asked["q_length"]
    # a sequence that reads another has no positions among its keys
    end = offset + q_length
    end = end if kind != "bidirectional" else max(asked["kv_length"], end)
    padding = None if attention_mask is None else _whole(attention_mask, end)
    if padding is not None and bool(padding.all()):
        padding = None
    static, slots = isinstance(at, Tensor), None
    if static and padding is not None:
        slots = _whole(attention_mask, asked["kv_length"])
    mask = ModelMask(
        kind=kind,
        q_length=q_length,
        q_offset=offset,
        kv_length=asked["kv_length"],
        kv_offset=asked["kv_offset"],
        padding=padding,
        left_padded=padding is not None and not bool(padding[:, :1].all()),
        parted=padding is not None and _is_parted(padding),
        past=reads_the_past(asked["mask_function"]),
        arguments={**asked, "q_offset": offset},
        offset=at.clone() if static else None,
        slots=slots,
    )
    return written_out(mask) if indexed and mask.kind == "causal" else mask


COMPILING = (2, 11)
"""The least torch whose compiler compares names of functions and takes any object as a constant."""


def require_compilable() -> None:
    """Raise AttnSpecError where torch's compiler is too old for a converted model."""
    if is_older(torch.__version__, COMPILING) and torch.compiler.is_dynamo_compiling():
        raise AttnSpecError(
            "torch.compile takes a converted model from torch 2.11 on,"
            f" this is torch {torch.__version__}"
        )


_WRITTEN = "and_masks.<locals>.and_mask"
"""The function of transformers that joins a causal mask with windows, or with documents."""


def _traced(asked: dict[str, Any]) -> ModelMask:
    """The facts in a traced program, which can neither read numbers nor enter a function. What
    a function is called is known, and it is asked whether queries read the key before: where models
    are traced, transformers takes every sequence for several packed ones."""
    require_compilable()
    q_length, kv_length, at = asked["q_length"], asked["kv_length"], asked["q_offset"]
    mask_function, attention_mask = asked["mask_function"], asked["attention_mask"]
    offset = at.clone() if isinstance(at, Tensor) else None
    first = kv_length - q_length if isinstance(at, Tensor) else at
    name = mask_function.__code__.co_qualname if isinstance(mask_function, FunctionType) else ""
    past, single = "allow_is_bidirectional_skip" not in asked, None
    if name in ("causal_mask_function", "bidirectional_mask_function"):
        kind = name.partition("_")[0]
    elif name != _WRITTEN or asked.get("use_vmap"):
        kind = "custom"
    else:
        kind = "causal" if asked.get("local_size") is None else "sliding"
        chunks = getattr(asked["config"], "attention_chunk_size", None)
        if past and attention_mask is None and chunks:
            # a chunk does not read the one before
            kind = "packed"
        elif past:
            q = torch.arange(q_length, device=asked.get("device"))
            batch = torch.arange(asked["batch_size"], device=q.device)[:, None]
            single = mask_function(batch, 0, q + first, (q + first - 1).clamp(min=0)).all()
    end = first + q_length if kind != "bidirectional" else max(kv_length, first + q_length)
    padding = None if attention_mask is None else _whole(attention_mask, end)
    return ModelMask(
        kind,
        q_length,
        first,
        kv_length,
        asked["kv_offset"],
        padding,
        past=past,
        arguments={**asked, "q_offset": first if offset is None else offset},
        offset=offset,
        slots=padding,
        single=single,
    )


class WrittenMask(Tensor):
    """A mask bool [B, 1, q, k] that knows its facts, and a mask that is made of it knows them too;
    None where it came in another way."""

    facts: ModelMask | None = None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, WrittenMask) and args and isinstance(args[0], WrittenMask):
            result.facts = args[0].facts
        return result


def written_out(facts: ModelMask) -> WrittenMask:
    """A causal mask as a tensor."""
    device = facts.arguments.get("device")
    place = device if isinstance(device, torch.device | str) else None
    q = torch.arange(facts.q_offset, facts.end, device=place)
    mask = torch.arange(facts.kv_length, device=place) <= q[:, None]
    if facts.padding is not None:
        rest = facts.kv_length - facts.end
        real = torch.nn.functional.pad(facts.padding, (0, rest)).to(mask.device)
        mask = mask & real[:, None]
    else:
        batch = facts.arguments.get("batch_size")
        mask = mask.expand(batch if isinstance(batch, int) else 1, -1, -1)
    written = mask[:, None].clone().as_subclass(WrittenMask)
    written.facts = facts
    return written


def part_of_padding(padding: Tensor | None, keys: slice) -> Tensor | None:
    """What is said of some positions by padding [B, n]."""
    return None if padding is None else padding[:, keys]


def part_of_inputs(
    program: Program, inputs: Mapping[str, Tensor] | None, keys: slice, queries: slice = slice(None)
) -> dict[str, Tensor] | None:
    """What run-time inputs say of some positions, and choices of some queries."""

    def part(entry: Input, x: Tensor, axis: int) -> Tensor:
        return x[(*[slice(None)] * axis, queries if entry.kind == "choices" else keys)]

    return None if inputs is None else along_positions(program, inputs, part)


def kind_of(mask_function: IndexMask) -> str:
    """The pattern of one of transformers' mask functions; "custom" where it cannot be told."""
    masks = import_module("transformers.masking_utils")
    if mask_function is masks.causal_mask_function:
        return "causal"
    if mask_function is masks.bidirectional_mask_function:
        return "bidirectional"
    makers = {part.__qualname__.partition(".")[0] for part in _parts(mask_function)}
    return next((kind for maker, kind in _KINDS.items() if maker in makers), "custom")


def reads_the_past(mask_function: IndexMask) -> bool:
    """Whether one of transformers' mask functions lets no later position through."""
    if mask_function is import_module("transformers.masking_utils").causal_mask_function:
        return True
    contents = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    inner = [x for each in contents for x in (each if isinstance(each, tuple) else (each,))]
    parts = [x for x in inner if callable(x)]
    either = getattr(mask_function, "__qualname__", "").startswith("or_masks")
    return bool(parts) and (all if either else any)(reads_the_past(part) for part in parts)


def _parts(function: object) -> Iterator[Callable[..., object]]:
    """A mask function and those it is composed of, which its closure holds."""
    if isinstance(function, tuple):
        for part in function:
            yield from _parts(part)
    elif callable(function) and hasattr(function, "__qualname__"):
        yield function
        for cell in getattr(function, "__closure__", None) or ():
            yield from _parts(cell.cell_contents)


def _is_parted(padding: Tensor) -> bool:
    """Whether padding, bool [B, n], stands between tokens of a sample."""
    begins = padding[:, 1:] & ~padding[:, :-1]
    return bool((begins.sum(1) + padding[:, :1].sum(1) > 1).any())


def _whole(mask: Tensor, end: int) -> Tensor:
    """bool [B, end]; a mask that is too short ends in padding."""
    padding = mask[:, :end].to(torch.bool)
    return torch.nn.functional.pad(padding, (0, end - padding.shape[1]))
