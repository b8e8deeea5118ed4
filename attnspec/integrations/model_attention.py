"""The attention function that a transformers model calls, for one compiled spec."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from attnspec.analysis.growth.stable import changed_by_padding, unstable
from attnspec.backends.common.remembered import Remembered
from attnspec.backends.common.torch_modes import is_recorded
from attnspec.graphs.forms.stability import CAUSAL as LATER_KEYS
from attnspec.graphs.forms.stability import must_be_stable, must_be_steady
from attnspec.graphs.look_back import look_back
from attnspec.graphs.patterns import BY_NAME
from attnspec.integrations.causality import (
    is_past_only,
    leaks,
    require_rows_done,
    why_not_past_only,
)
from attnspec.integrations.model_advice import (
    COUNTS_REAL,
    CROSS,
    PACKED,
    READS_BOTH_WAYS,
    of_mask,
    of_terms,
    own_terms,
)
from attnspec.integrations.model_choices import (
    BLOCKS,
    INDICES,
    INPUT,
    SINK,
    Lists,
    chooses,
    lists_of,
    own_input,
    variant,
    with_sink,
)
from attnspec.integrations.model_layers import (
    PLAIN,
    Place,
    attribute_of,
    crosses,
    decodes,
    layers_in,
    place_of,
)
from attnspec.integrations.model_mask import (
    CACHED,
    REPLACED,
    WIDENED,
    ModelMask,
    part_of_inputs,
    part_of_padding,
    require_compilable,
)
from attnspec.integrations.real_positions import RealRunning
from attnspec.ir.program import Input, Program
from attnspec.ir.scalars import symbols
from attnspec.lower.lower import Binder
from attnspec.model_check.wanted import documents
from attnspec.runtime.call_checks import along_positions
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    from attnspec.runtime.module import CompiledAttention

_HARMLESS = frozenset(
    {
        "input_ids",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keywords of models that change nothing of what is computed here."""

_LOG = logging.getLogger("attnspec")

_SHORT = 64
"""The length at which causality is examined before a first call."""

_SAME_SCALE = 1e-6
"""Relative difference up to which two scales are one: float32 knows them no better."""


class ModelAttention:
    """Calls a compiled spec with what transformers passes, or says why that would be wrong."""

    def __init__(self, module: CompiledAttention) -> None:
        self.module = module
        self.program: Program = module.program
        self.standing: Mapping[str, Tensor] | None = None
        # what stands may be for another side of a model
        self.shares = False
        # the lengths of a long-running server come and go: only so many answers are kept
        self._past_only = lru_cache(maxsize=1024)(why_not_past_only)
        self._unstable = lru_cache(maxsize=1024)(unstable)
        self._padded = lru_cache(maxsize=1024)(changed_by_padding)
        self._said: set[str] = set()
        # the documents that the positions of the last pass show
        self._documents: Remembered[Tensor | None] = Remembered()
        # of packed passes that caches may go on from: whether they had gradients
        self._packed: set[bool] = set()
        # every layer computes the same, and what traces one has traced them all
        self._same = self.program.layers is None and not module.engine.binder.alike(1)

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: ModelMask | Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        attnspec_inputs: Mapping[str, Tensor] | None = None,
        **others: object,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, [B, q, H, d_v] and contiguous, and no weights.

        query [B, H, q, d]; key, value [B, H_kv, k, d], where k may reach beyond the positions
        written so far. Arguments are transformers' own, except `attnspec_inputs`: the run-time
        inputs of the spec, which models pass on. Of `indices` and `block_indices` a layer reads the
        pairs of its spec that are also chosen, or takes them for the one input of kind `choices`
        that the spec declares; `s_aux` [H] is the logit of `softmax1`. Raises AttnSpecError where
        the model asks for anything else that the spec does not say.
        """
        place = place_of(module)
        terms = {name: others.pop(name, None) for name in (INDICES, BLOCKS, SINK)}
        layer = self.layer_of(module)
        self.refuse(module, others, layer)
        self.require_one_sequence(module)
        self.require_held(place)
        attention_mask, selected = _selection(module, attention_mask, terms, key.shape[2])
        lists = lists_of(module, terms, selected)
        mask = self._mask(attention_mask, module, query, key, is_causal)
        of, traced = (layer, query.shape[1]), is_recorded(query)
        self._require_meant(place, mask, of, bool(is_causal), traced)
        query = self.scaled(query, scaling, layer, mask.end)
        sink = cast("Tensor | None", terms[SINK])
        about = mask, others.get("position_ids"), len(query)
        attnspec_inputs = self.with_documents(attnspec_inputs, *about)
        inputs = self.inputs_of(attnspec_inputs, mask, lists is not None, place)
        cached = getattr(key, CACHED, None)
        if not traced:
            self._require_rows_done(place, mask, of, inputs, cached is not None)
        dropout = dropout if module.training else 0.0
        running, inputs = self._run_of(place, lists, sink is not None, inputs, mask, of)
        settings: dict[str, Any] = {"layer": layer, "return_lse": sink is not None}
        if traced and mask.offset is not None:
            settings["keys"] = mask.offset + mask.q_length
        if cached is not None:
            if dropout > 0:
                raise AttnSpecError(
                    f"`{self.program.name}` continues from a `SpecCache`, which applies no dropout:"
                    " call `model.eval()`, or pass `past_key_values = DynamicCache()`"
                )
            output = cached.of(module).go_on(running, (query, key, value), mask, inputs, settings)
        else:
            self._require_within(module, mask, *of, lists is not None)
            settings |= {"dropout_p": dropout, "inputs": inputs}
            output = self._called(running, (query, key, value), mask, settings)
        out = output if sink is None else with_sink(output[0], output[1], sink)
        return out.transpose(1, 2).contiguous(), None

    def _require_meant(
        self, place: Place | None, mask: ModelMask, of: tuple[int, int], asked: bool, traced: bool
    ) -> None:
        """Raise unless a layer, `of` so many heads, reads back where it must, and rows that a cache
        holds are those of the whole sequence."""
        self.require_heads(of[1])
        causal = must_read_back(place, mask.kind == "causal" or asked)
        if traced:
            require_compilable()
            # `bool` of a symbol would be another one, and what is asked must be plain
            offset = 1 if mask.q_offset else 0
            about = (*of, causal, offset, mask.padding is not None)
            # no place itself: each layer has its own, and a trace would be for one of them
            settings = None if place is None else (place.causal, place.real)
            untraced(self, "_check_form", settings, *about)
            return
        fault = self._past_only(self.program, *of, mask.end, mask.q_length) if causal else ""
        if fault:
            raise AttnSpecError(fault)
        self._require_same_rows(mask, *of, place)

    def _called(
        self,
        running: CompiledAttention | RealRunning,
        tensors: tuple[Tensor, Tensor, Tensor],
        mask: ModelMask,
        settings: dict[str, Any],
    ) -> Any:
        """What a call gives with the keys of a cache, which may begin at a later position and have
        slots that nothing was written to."""
        query, *rest = tensors
        key, value = (x[:, :, : mask.end - mask.kv_offset] for x in rest)
        later = slice(mask.kv_offset, None)
        settings["key_padding_mask"] = part_of_padding(mask.padding, later)
        if mask.kv_offset:
            settings["inputs"] = part_of_inputs(self.program, settings["inputs"], later)
        return running(query, key, value, **settings)

    def _run_of(
        self,
        place: Place | None,
        lists: Lists | None,
        sink: bool,
        inputs: Mapping[str, Tensor] | None,
        mask: ModelMask,
        of: tuple[int, int],
    ) -> tuple[CompiledAttention | RealRunning, Mapping[str, Tensor] | None]:
        """What computes at a place of a model, its pairs cut to lists that the model chose, over
        real tokens alone where `convert` was asked for that; and the run-time inputs with these
        lists, without slots of a cache behind the last query, which are empty."""
        module = run = self.module_of(place)
        if lists is not None or sink:
            key = None if lists is None else lists[0], sink
            untraced(self, "_make_variant", module, *key)
            run = module.variants[key]
            run.check_finite, run.training = module.check_finite, module.training
        if lists is not None:
            taken, (size, numbers) = own_input(self.program), lists
            chosen = numbers.masked_fill(numbers * size >= mask.end, -1)
            inputs = {**(inputs or {}), INPUT if taken is None else taken.name: chosen}
        if place is not None and place.real:
            return RealRunning(run, mask.padding, untraced(self, "_is_moved", *of)), inputs
        return run, inputs

    def _is_moved(self, layer: int, heads: int) -> bool:
        """Whether padding behind a sample changes its rows."""
        return self._padded(self.program, layer, heads) is not None

    def _make_variant(self, own: CompiledAttention, size: int | None, sink: bool) -> None:
        """Have a module that reads what the model chose in blocks of a size, or beside a sink."""
        if (size, sink) not in own.variants:
            variant(own, size, sink)

    def module_of(self, place: Place | None) -> CompiledAttention:
        """What computes at a place of a model: what the model holds there, or the module itself."""
        return self.module if place is None or place.attention is None else place.attention

    def require_fit(self, module: torch.nn.Module) -> None:
        """Raise for what is known of a layer before it is called: the spec cannot stand for it."""
        self.require_one_sequence(module)
        layer = self.layer_of(module)
        self.refuse(module, dict(own_terms(module)), layer)
        self.require_held(place_of(module))
        declared = attribute_of(module, "num_attention_heads")
        heads = declared if isinstance(declared, int) else self.program.head_count
        self.require_heads(heads)
        if must_read_back(place_of(module), reads_back(module)):
            try:
                fault = self._past_only(self.program, layer, heads, _SHORT, _SHORT)
            except ValueError:
                # not every graph is there at every length: it is examined when it is called
                fault = ""
            if fault:
                raise AttnSpecError(fault)

    def _require_rows_done(
        self,
        place: Place | None,
        mask: ModelMask,
        of: tuple[int, int],
        inputs: Mapping[str, Tensor] | None,
        cached: bool,
    ) -> None:
        """Raise where a layer, `of` so many heads, is meant to read later positions, and a cache
        holds rows that read a key of this call, or will not hold what they read."""
        if not _reads_ahead(place) or not (mask.q_offset or cached):
            return
        if cached:
            raise AttnSpecError(
                f"the cache must keep every key, since `{self.program.name}` reads later positions:"
                " pass `past_key_values = DynamicCache()`"
            )
        kinds = {entry.name: entry.kind for entry in self.program.inputs}
        named = {name: x for name, x in (inputs or {}).items() if kinds.get(name) != "choices"}
        positions, real = (mask.q_offset, mask.end), place is not None and place.real
        require_rows_done(self.program, of, positions, named, mask.padding, real_alone=real)

    def _check_form(
        self,
        asked: tuple[bool | None, bool] | None,
        layer: int,
        heads: int,
        causal: bool,
        offset: int,
        padded: bool,
    ) -> None:
        """Raise, or warn, where a program that is traced would compute something else than the
        model at some length, or behind a cache, or beside padding; `asked` of `convert` were
        `causal` and `real`, of a place."""
        place = None if asked is None else Place(None, None, causal=asked[0], real=asked[1])
        if causal and not is_past_only(self.program, layer):
            why = "in a program of every length no pairs are examined"
            raise AttnSpecError(leaks(self.program, why))
        if _reads_ahead(place) and offset:
            raise AttnSpecError(
                f"`{self.program.name}` reads later positions, so that rows in the cache may be"
                " incomplete, and a traced program cannot check this: call the model without"
                " tracing"
            )
        facts = ModelMask("causal", 1, offset, 1, 0, torch.ones(1, 1) if padded else None)
        self._require_same_rows(facts, layer, heads, place)

    def _require_same_rows(
        self, mask: ModelMask, layer: int, heads: int, place: Place | None
    ) -> None:
        """Raise where a cache holds rows that are others at this length; warn, once, where padding
        makes rows others than those of the sample alone."""
        name = self.program.name
        if mask.q_offset:
            # a row that reads later keys is examined with the keys that came
            ahead = self._padded if _reads_ahead(place) else self._unstable
            fault = ahead(self.program, layer, heads)
            if fault is not None:
                later = place is not None and fault.mend == LATER_KEYS and place.causal is None
                raise AttnSpecError(must_be_stable(name, fault) + READS_BOTH_WAYS * later)
        if mask.padding is None or (place is not None and place.real):
            return
        fault = self._padded(self.program, layer, heads)
        if fault is not None:
            self.warn_once("padding", must_be_steady(name, fault))
        if mask.left_padded and self._absolute:
            self.warn_once(
                "padding on the left",
                f"`{name}` names positions or draws by them, and padding on the left shifts the "
                f"positions of all tokens: {COUNTS_REAL}",
            )
        # the order of positions stays, whatever is between them
        ordered = all(leaf.pattern in ("full", "causal") for leaf in self.program.leaves)
        if mask.parted and not ordered:
            self.warn_once(
                "padding in between",
                f"`{name}` reads by distances or positions, and padding between tokens shifts the "
                f"positions of the tokens after it: {COUNTS_REAL}",
            )

    def warn_once(self, about: str, words: str) -> None:
        if about not in self._said:
            self._said.add(about)
            warnings.warn(words, stacklevel=4)

    def refuse(self, module: torch.nn.Module, others: Mapping[str, object], layer: int) -> None:
        """Raise for keywords that change what is computed, and for those that are not known."""
        terms = {
            name: value
            for name, value in others.items()
            if not (value is None or value is False or name in _HARMLESS)
            and not self._says(name, value, module, layer)
        }
        if terms:
            said = (f"`{x}`" + f" of {y}" * (type(y) in (int, float)) for x, y in terms.items())
            raise AttnSpecError(
                f"the model also passes {' and '.join(said)}, which"
                f" `{self.program.name}` does not describe: {of_terms(terms, module)}"
            )

    def _says(self, name: str, value: object, module: torch.nn.Module, layer: int) -> bool:
        """Whether the spec stands for a keyword: a window that it replaces, a cap that every head
        has too, the model's own table of a bias."""
        place = place_of(module)
        if name == "softcap":
            scores = [attend.scores for attend in self.program.attends_of(layer)]
            caps = [[dict(x.arguments)["cap"] for x in s if x.name == "softcap"] for s in scores]
            return all(cap == [value] for cap in caps)
        if name == "position_bias" and crosses(module):
            # zeros, where no table is learned
            return not getattr(module, "has_relative_attention_bias", True)
        if place is None:
            return False
        return name == "sliding_window" or (name == "position_bias" and place.table is not None)

    def require_held(self, place: Place | None) -> None:
        """Raise where the model does not hold what the spec learns, or has other tokens of its own
        before its sequence."""
        name, extra = self.program.name, self.program.extra_tokens
        if place is None and extra:
            raise AttnSpecError(
                f"a spec with `extra_tokens` cannot be registered, and `{name}` has {extra}: remove"
                " the statement; if the model has such tokens, as ViT has a class token, use"
                " `convert(model, spec)`"
            )
        if (place is None or place.attention is None) and learns(self.module):
            raise AttnSpecError(
                f"`{name}` has trainable parameters, and `register` cannot add them to a model: use"
                " `convert(model, spec)`, which adds them"
            )
        added = 0 if place is None else place.extra
        if extra != added and (extra or self.program.grid):
            raise AttnSpecError(
                f"`extra_tokens` must be the model's class tokens and registers, {added}, got"
                f" {extra} in `{name}`: write `extra_tokens {added}`"
                if added
                else f"`{name}` has {extra} extra tokens, and the model has none: leave"
                " `extra_tokens` out"
            )

    def _require_within(
        self, module: torch.nn.Module, mask: ModelMask, layer: int, heads: int, chosen: bool
    ) -> None:
        """Raise unless a cache that begins at a later position holds all that the queries read."""
        if not mask.kv_offset:
            return
        windows = [
            None if work.mechanism is not None else look_back(work.relation)
            for work, _ in Binder(self.program).works(layer, heads, mask.q_length, mask.end)
        ]
        room = mask.q_offset - mask.kv_offset
        bounded = all(x is not None and not x.first and x.before <= room for x in windows)
        if chosen or self._absolute or not bounded:
            raise self._needs_its_past(module, f"this one starts at position {mask.kv_offset}")

    def _needs_its_past(self, module: torch.nn.Module, cause: str) -> AttnSpecError:
        kinds = attribute_of(module, "layer_types") or ()
        # other layers keep something else, for which that cache has no place
        plain = all(kind in PLAIN for kind in kinds)
        whole = "`past_key_values = DynamicCache()`, which has no windows, or " if plain else ""
        state = "`SpecCache(model)`" if plain else "`past_key_values = SpecCache(model)`"
        return AttnSpecError(
            f"the cache must keep every key that `{self.program.name}` reads, but {cause}: pass"
            f" {whole}{state}, which keeps what the spec may still read"
        )

    def require_one_sequence(self, module: torch.nn.Module | None = None) -> None:
        """Raise for a layer that reads another sequence, or stands beside one that does, and for a
        spec that joins two."""
        if self.program.cross:
            raise AttnSpecError(
                f"`{self.program.name}` has `cross`, and self-attention needs a spec without it:"
                " `convert(model, cross=spec)` gives the spec to the cross-attention of a decoder"
            )
        if module is None:
            return
        if crosses(module):
            raise self._crossing("")
        if decodes(module) and place_of(module) is None:
            raise AttnSpecError(
                "this decoder also has cross-attention, which would use the same spec, and"
                f" `{self.program.name}` is a spec of one sequence: {CROSS}"
            )

    def _crossing(self, lengths: str) -> AttnSpecError:
        return AttnSpecError(
            f"this layer is cross-attention{lengths}, and `{self.program.name}` is a spec of one"
            f" sequence: {CROSS}"
        )

    def _mask(
        self,
        given: ModelMask | Tensor | None,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        is_causal: bool | None,
    ) -> ModelMask:
        """The facts that the mask function left, checked against the tensors."""
        q_length, kv_length = query.shape[2], key.shape[2]
        if isinstance(given, Tensor):
            raise AttnSpecError(
                "attention_mask must be a padding mask [batch, length], since"
                f" `{self.program.name}` says which keys are read, got {list(given.shape)}"
            )
        if given is None:
            given = _without_mask(module, q_length, kv_length, is_causal)
        place = place_of(module)
        both = _reads_ahead(place)
        # a mask of its own that reads later positions is replaced where the model means it to
        ways = both or (place is not None and getattr(module, "is_causal", None) is False)
        if is_recorded(query):
            given = given.of_slots()
            if given.single is not None and not self._replaces("packed", place):
                torch._assert_async(given.single, self._asks_for("packed", module))
        if self._replaces(given.kind, place):
            given = replace(given, kind="causal" if given.past else "bidirectional")
        elif given.kind in WIDENED and ways and not given.past:
            given = replace(given, kind="bidirectional")
        if (
            given.kind == "bidirectional"
            and not both
            and (getattr(module, "is_decoder", False) or given.end != given.kv_length)
        ):
            raise self._crossing(f" of {given.q_length} queries and {given.kv_length} keys")
        if both and given.padding is not None and given.padding.shape[1] > given.end:
            # a mask that is not causal reaches over places that nothing was written to yet
            here = given.padding[:, : given.end]
            given = replace(given, padding=None if bool(here.all()) else here)
        if given.kind not in ("causal", "bidirectional"):
            raise AttnSpecError(self._asks_for(given.kind, module))
        short = given.kv_offset + kv_length < given.end and not hasattr(key, CACHED)
        if given.q_length != q_length or short:
            cause = (
                f"the mask was made for {given.q_length} queries and {given.end} keys, "
                f"got {q_length} and {kv_length}"
            )
            past = given.q_offset and short
            raise self._needs_its_past(module, cause) if past else AttnSpecError(cause)
        return given

    def _asks_for(self, kind: str, module: torch.nn.Module) -> str:
        """Why a mask of a kind is refused."""
        return (
            f"the model asks for a {kind} mask, which `{self.program.name}` would replace:"
            f" {of_mask(kind, module)}"
        )

    def layer_of(self, module: torch.nn.Module) -> int:
        """The layer of the spec that a module of the model is."""
        if self._same:
            return 0
        place = place_of(module)
        layer, count = getattr(module, "layer_idx", None), layers_in(module)
        if place is not None:
            layer, count = place.layer, place.layers
        layers = self.program.layers
        if layers is None:
            return int(layer or 0)
        if layer is None and layers > 1:
            raise AttnSpecError(
                f"`{self.program.name}` has {layers} layers, and {type(module).__name__} has no"
                " `layer_idx` that says which of them it is: write a spec of one pattern, without"
                " `layers`"
                + ", or use `convert(model, spec)`, which numbers the layers"
                * (place is None)
            )
        wrong = ""
        if layer is not None and layer >= layers:
            wrong = f"asks for layer {layer}: write `layers {count or layer + 1}`"
        elif count is not None and count < layers:
            wrong = f"has only {count}: write `layers {count}`"
        if wrong:
            raise AttnSpecError(f"`{self.program.name}` has {layers} layers, and the model {wrong}")
        return int(layer or 0)

    def require_heads(self, heads: int) -> None:
        """Raise unless the spec has one pattern for every head, or as many as the model."""
        declared = self.program.heads
        if declared is not None and declared != heads:
            raise AttnSpecError(
                f"`{self.program.name}` has {declared} heads, and the model has {heads}: "
                f"write `heads {heads}`"
            )

    def _replaces(self, kind: str, place: Place | None) -> bool:
        """Whether the spec takes the place of what a mask of the model's own is for."""
        documents = any(entry.kind == "ids" for entry in self.program.inputs)
        return (kind == "packed" and documents) or (kind in REPLACED and place is not None)

    def with_documents(
        self, given: Mapping[str, Tensor] | None, mask: ModelMask, position_ids: object, batch: int
    ) -> Mapping[str, Tensor] | None:
        """The run-time inputs, with the documents that `position_ids` show where the spec has one
        input, of kind `ids`, that no call passes. A step behind a cache belongs to one document
        where its positions count every real token before it, and no earlier pass was packed: one
        of training counts until the next pass. The log of this package says which documents there
        are, and a warning, once, where the spec does not tell them apart."""
        kinds = [entry.kind for entry in self.program.inputs]
        taken = kinds == ["ids"] and given is None and self.standing is None
        traced = torch.compiler.is_compiling()
        learns = torch.is_grad_enabled()
        if "ids" in kinds and not taken and not traced:
            self._packed.add(learns)
        # a trace has no warnings, and must know no more than it needs
        if (not taken and (traced or "ids" in kinds)) or not isinstance(position_ids, Tensor):
            return given
        if position_ids.ndim != 2 or position_ids.shape[1] != mask.q_length:
            return given
        if mask.q_offset and (not taken or traced or self._packed):
            return given

        def shown() -> Tensor | None:
            new, real = position_ids.expand(batch, -1), mask.padding
            later = None if real is None else real[:, mask.q_offset :]
            labels = torch.nn.functional.pad(documents(new, later), (mask.q_offset, 0))
            if mask.q_offset:
                before = mask.q_offset if real is None else real[:, : mask.q_offset].sum(1)
                if not bool((new[:, 0] == before).all()):
                    return None
            if not traced and bool(labels.any()):
                self._packed.add(learns)
                self._tell_documents(labels, taken)
            elif not traced and not mask.q_offset:
                self._packed.discard(True)
            return labels

        # the layers of one pass are given the same tensors, which a GPU is waited for once
        read = [position_ids] if mask.padding is None else [position_ids, mask.padding]
        settings = mask.q_offset, batch, taken, learns
        labels = shown() if traced else self._documents.get(read, shown, *settings)
        return {self.program.inputs[0].name: labels} if taken and labels is not None else given

    def _tell_documents(self, labels: Tensor, taken: bool) -> None:
        """Log, or warn, that a pass was packed."""
        count = f"`position_ids` show up to {int(labels.max()) + 1} packed documents a sample"
        name = self.program.name
        if taken:
            # just what is meant: nothing to warn of
            _LOG.info(
                "%s; they are the input `%s` of `%s`", count, self.program.inputs[0].name, name
            )
        else:
            self.warn_once(
                "packed documents", f"{count}, and `{name}` lets them read each other: {PACKED}"
            )

    def inputs_of(
        self,
        given: Mapping[str, Tensor] | None,
        mask: ModelMask,
        chosen: bool = False,
        place: Place | None = None,
    ) -> Mapping[str, Tensor] | None:
        """The run-time inputs of a call: its own, or those that stand, up to its last position;
        where the model has chosen, without the one for choices."""
        taken = own_input(self.program) if chosen else None
        declared = {e.name: e.kind for e in self.program.inputs if e is not taken}
        if given is not None or not declared:
            return given
        if self.standing is None:
            names = ", ".join(f"`{name}`" for name in declared)
            raise AttnSpecError(
                f"`{self.program.name}` needs its inputs {names}: pass "
                "`attnspec_inputs={input: tensor}` to the model, or call the model or `generate` "
                "under `with_inputs(name, {input: tensor})`"
            )
        for name in self.standing:
            if declared.get(name) == "length" and mask.q_offset and not _reads_ahead(place):
                raise AttnSpecError(
                    f"the length `{name}` grows with every generated token, and `with_inputs` "
                    "keeps it fixed: pass `attnspec_inputs` in calls of the model itself"
                )
            if declared.get(name) == "choices" and mask.offset is not None and is_recorded():
                raise AttnSpecError(
                    f"a traced step with a static cache needs the choices `{name}` of its queries:"
                    " pass `attnspec_inputs` in calls of the model itself"
                )

        def reaching(entry: Input, x: Tensor, axis: int) -> Tensor:
            if entry.name in declared and x.shape[axis] < mask.end:
                raise AttnSpecError(
                    f"the input `{entry.name}` must reach as far as the sequence, {mask.end}"
                    f" positions, got {x.shape[axis]}: give it for all that `generate` may write"
                )
            return x

        # what stands may be for another side of the model, too
        named = {x: t for x, t in self.standing.items() if x in declared or not self.shares}
        named = along_positions(self.program, named, reaching)
        keys, queries = slice(0, mask.end), slice(mask.q_offset, mask.end)
        return part_of_inputs(self.program, named, keys, queries)

    def scaled(self, query: Tensor, scaling: float | None, layer: int, n: int) -> Tensor:
        """The query such that the spec's own scale gives what the model's would.

        Where the spec declares a scale it must be the model's.
        """
        default = query.shape[-1] ** -0.5
        if scaling is None:
            return query
        if any(attend.scale is not None for attend in self.program.attends):
            lengths = (None, None) if is_recorded(query) else (query.shape[2], n)
            for scale in untraced(self, "_scales", layer, query.shape[1], *lengths):
                scale = default if scale is None else scale
                if not _is_same(scaling, scale):
                    raise AttnSpecError(
                        f"the scale of `{self.program.name}` must be the model's, {scaling:.6g}, "
                        f"got {scale:.6g}: leave `scale` out of the spec"
                    )
            return query
        return query if _is_same(scaling, default) else query * (scaling / default)

    def _scales(
        self, layer: int, heads: int, n_q: int | None, n: int | None
    ) -> tuple[float | None, ...]:
        """The scales of a layer, None for the usual one: for n_q of n positions, or at every
        length, where one that reads n is refused."""
        if n is None:
            declared = (attend.scale for attend in self.program.attends)
            if any("n" in symbols(scale) for scale in declared if scale is not None):
                raise AttnSpecError(
                    f"the scale of `{self.program.name}` must be the model's at every length that a"
                    " traced program may get, and it reads n: leave `scale` out of the spec"
                )
            n_q = n = self.program.fixed_length or _SHORT
        works = Binder(self.program).works(layer, heads, n_q or n, n)
        return tuple({work.scale: None for work, _ in works})

    @property
    def _absolute(self) -> bool:
        """Whether the pairs depend on where a sequence begins."""
        leaves = self.program.leaves
        return any(BY_NAME[leaf.pattern].anchors(dict(leaf.arguments)) for leaf in leaves)


def must_read_back(place: Place | None, asked: bool) -> bool:
    """Whether a layer must read no later position, as `convert` or the model asks."""
    return asked if place is None or place.causal is None else place.causal


def _reads_ahead(place: Place | None) -> bool:
    """Whether a layer is meant to read later positions, by what `convert` was asked for."""
    return place is not None and place.causal is False


def reads_back(module: torch.nn.Module) -> bool:
    """Whether a layer says that it reads no later position, and its config does not deny it."""
    config = getattr(module, "config", None)
    return bool(getattr(module, "is_causal", False)) and getattr(config, "is_causal", True)


def _without_mask(
    module: torch.nn.Module, q_length: int, kv_length: int, is_causal: bool | None
) -> ModelMask:
    """The facts of a model that asks for no mask: it has no padding and no cache."""
    if q_length != kv_length:
        raise AttnSpecError(
            f"without a mask there must be as many queries as keys, got {q_length} and"
            f" {kv_length}: pass a mask, which says where the queries are"
        )
    past = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return ModelMask("causal" if past else "bidirectional", q_length, 0, kv_length, 0, None)


def own_attention(
    module: torch.nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: ModelMask | Tensor | None,
    settings: Mapping[str, object],
) -> tuple[Tensor, Tensor | None]:
    """What a layer computes that keeps its own attention beside layers with a spec: by the name of
    its place, with the mask that it would get."""
    place = place_of(module)
    name = "sdpa" if place is None or place.own is None else place.own
    own_mask = mask.of_own(name) if isinstance(mask, ModelMask) else mask
    eager = inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")
    attend = import_module("transformers").AttentionInterface().get_interface(name, eager)
    kept = {key: value for key, value in settings.items() if value is not None}
    output: tuple[Tensor, Tensor | None] = attend(module, *tensors, own_mask, **kept)
    return output


def _is_same(scale: float, other: float) -> bool:
    """Whether two scales are one. In a trace they are not plain numbers."""
    return abs(scale - other) <= _SAME_SCALE * abs(other)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def untraced(attention: ModelAttention, method: str, *arguments: object) -> Any:
    """What a method returns of what is not a tensor, called outside of a trace: for good."""
    return getattr(attention, method)(*arguments)


def learns(module: CompiledAttention) -> bool:
    """Whether an attention has something that a model must hold, train and save."""
    return next(chain(module.parameters(), module.buffers()), None) is not None


def _selection(
    module: torch.nn.Module,
    mask: ModelMask | Tensor | None,
    own: Mapping[str, object],
    kv_length: int,
) -> tuple[ModelMask | Tensor | None, Tensor | None]:
    """The facts of a mask that a layer with an indexer passes on, and the pairs that it lets
    through, bool [B, 1 or H, q, k], if they are what the layer chose."""
    if not isinstance(mask, Tensor) or mask.ndim != 4 or not chooses(module):
        return mask, None
    facts, listed = getattr(mask, "facts", None), own[INDICES] is not None
    if listed:
        return facts if isinstance(facts, ModelMask) else mask, None
    plain = mask.as_subclass(Tensor)
    selected = plain if plain.dtype == torch.bool else plain == 0
    if isinstance(facts, ModelMask):
        return replace(facts, padding=None), selected[..., : facts.end]
    length = mask.shape[2]
    if length != kv_length and not bool(selected[:, :, -1, -1].any()):
        raise AttnSpecError(
            f"the cache must end with the last query, and no sample reads the last of its"
            f" {kv_length} keys: pass `past_key_values = DynamicCache()`"
        )
    return ModelMask("causal", length, kv_length - length, kv_length, 0, None), selected
