"""`attnspec.from_hf_config`: what the layers of a model of transformers read, from its config.

Windows mean what transformers makes of them: a causal `sliding_window = w` keeps w keys, with the
query's own; Longformer's `attention_window = w` keeps w / 2 on each side. The spec says how scores
are changed, too: soft caps, a scale of the config's own, learned sinks as `softmax1`.
Source: transformers 5, masking_utils.py and the models' files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import AttnSpecError, hinted, ranges

Config = Mapping[str, Any]

_CAUSAL = frozenset(
    "llama mistral mixtral gemma gemma2 gemma3_text gemma3n_text gpt_oss llama4_text qwen2"
    " qwen2_moe qwen3 qwen3_moe phi phi3 gpt2 opt gpt_neo gpt_neox gptj starcoder2 cohere cohere2"
    " olmo olmo2 olmo3 granite stablelm smollm3 ministral exaone4 xglm biogpt codegen bloom".split()
)
"""Types whose layers read no later token."""

_BOTH_WAYS = frozenset(
    "bert roberta distilbert electra albert camembert xlm-roberta mpnet modernbert vit dinov2 deit"
    " beit clip_vision_model siglip_vision_model esm layoutlm splinter data2vec-text ijepa".split()
)
"""Types whose layers read both ways."""


_MIXED = frozenset(
    "cohere2 exaone4 gemma2 gemma3_text gemma3n_text gpt_oss llama4_text ministral modernbert olmo3"
    " qwen2 qwen2_moe qwen3 smollm3".split()
)
"""Types whose class computes `layer_types` where a config, as on the hub, leaves them out."""


_INDEXERS = ("index_topk", "index_topk_blocks")
"""What configs say of layers that choose keys for each query."""


@dataclass(frozen=True)
class Layers:
    """What is written of a model: an `attend` for each layer, and what holds for all of them."""

    attends: tuple[str, ...]
    causal: bool
    inputs: tuple[str, ...] = ()
    lines: tuple[str, ...] = field(default=())


def from_hf_config(config: object, *, causal: bool | None = None, part: str | None = None) -> Spec:
    """The spec of a model of transformers: of its config, an object or a dictionary.

    A config without a `text_config` of its own is taken as it is; where layers are of several kinds
    and a dictionary has no `layer_types`, transformers' own class of it is asked. `part` is
    "encoder" or "decoder" where a model has both. `causal` says of a type that is not known here
    whether its layers read later tokens. Raises ValueError with the reason for layers that no spec
    says, and for settings that leave pairs open.
    """
    given = _plain(config)
    if isinstance(given.get("text_config"), Mapping):
        given = given["text_config"]
    kind = str(given.get("model_type", ""))
    if causal is not None and not isinstance(causal, bool):
        raise TypeError(f"`causal` must be True or False, got {type(causal).__name__}")
    if kind in _OF_TWO:
        found = _OF_TWO[kind](given, _stack(kind, part))
    elif part is not None:
        raise AttnSpecError(f"`{kind}` has one stack of layers, so there is no part {part!r}")
    elif kind in _OWN:
        found = _OWN[kind](given)
    else:
        _require_no_indexer(given)
        reads_back = _reads_back(kind, causal)
        if kind in _MIXED and given.get("layer_types") is None:
            given = _of_class(kind, given)
        found = _by_layer_types(given, reads_back or (causal is None and _decodes(given)))
    if not found.attends:
        raise AttnSpecError("the config has no layers: there must be at least one")
    return parse(_text(kind, found))


def _require_no_indexer(given: Config) -> None:
    for name in _INDEXERS:
        if given.get(name) is not None:
            raise AttnSpecError(
                f"the layers choose keys by an indexer of their own (`{name} = {given[name]}`):"
                " `convert(model, spec)` reads what it chose within a spec, and `chosen(x)` in a"
                " spec takes choices as an input"
            )


def _plain(config: object) -> Config:
    """A config as a dictionary, with what its class computes."""
    if isinstance(config, Mapping):
        return config
    if not hasattr(config, "to_dict"):
        raise TypeError(f"a config or its dictionary is needed, got {type(config).__name__}")
    found: dict[str, Any] = dict(config.to_dict())
    found.setdefault("model_type", getattr(config, "model_type", ""))
    if hasattr(config, "sliding_window"):
        found["sliding_window"] = config.sliding_window
    return found


def _of_class(kind: str, given: Config) -> Config:
    """A dictionary with what the class of its type in transformers computes from it.

    Raises AttnSpecError without transformers, and for what the class refuses.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise AttnSpecError(
            f"layers of `{kind}` are of several kinds, and the config has no `layer_types`: add"
            " them, or install transformers, whose class computes them"
        ) from None
    try:
        rest = {name: value for name, value in given.items() if name != "model_type"}
        return _plain(AutoConfig.for_model(kind, **rest))
    except Exception as error:
        said = str(error).strip().replace("\n", " ")
        raise AttnSpecError(f"transformers refuses this config of `{kind}`: {said:.200}") from error


def _decodes(given: Config) -> bool:
    """Whether an encoder's class is asked to be a decoder, which reads no later token."""
    return given.get("model_type") in _BOTH_WAYS and given.get("is_decoder") is True


def _reads_back(kind: str, causal: bool | None) -> bool:
    if causal is not None:
        return causal
    if kind not in _CAUSAL | _BOTH_WAYS:
        known = sorted(_CAUSAL | _BOTH_WAYS | _OWN.keys() | _OF_TWO.keys())
        message = (
            f"the model type {kind!r} is not known here: say `causal = True` or False if its layers"
            " are what `layer_types` and `sliding_window` say"
        )
        raise AttnSpecError(hinted(message, kind, known))
    return kind in _CAUSAL


def _text(kind: str, found: Layers) -> str:
    """The text: what most layers do, and the others by their numbers."""
    name = "".join(c if c.isalnum() else "_" for c in kind) or "model"
    lines = [f"attention {name} {{"]
    lines += ["    causal"] if found.causal else []
    lines += [f"    layers {len(found.attends)}", *(f"    input {each}" for each in found.inputs)]
    usual = max(dict.fromkeys(found.attends), key=found.attends.count)
    lines.append(f"    attend {usual}")
    for other in dict.fromkeys(each for each in found.attends if each != usual):
        numbers = [at for at, each in enumerate(found.attends) if each == other]
        lines.append(f"    layer {ranges(numbers)} {{ attend {other} }}")
    return "\n".join([*lines, *(f"    {line}" for line in found.lines), "}", ""])


# --- layers by their types ------------------------------------------------------------------------


def _by_layer_types(given: Config, causal: bool) -> Layers:
    """Layers that `layer_types`, or the one `sliding_window`, tell."""
    if given.get("use_bidirectional_attention"):
        causal = False
    types = given.get("layer_types")
    count = _count_of(given)
    if types is None:
        window = given.get("sliding_window") if given.get("use_sliding_window", True) else None
        types = ["full_attention" if window is None else "sliding_attention"] * count
    if len(types) != count:
        raise AttnSpecError(
            f"`layer_types` has {len(types)} entries, and the config {count} layers: one each"
        )
    attends = tuple(_layer(str(kind), given, causal) for kind in types)
    return Layers(attends, causal, (), tuple(_scores(given)))


def _layer(kind: str, given: Config, causal: bool) -> str:
    if kind == "full_attention":
        return "full"
    if kind == "sliding_attention":
        window = _size(given, "sliding_window")
        # both ways, as many on each side as causally with the query's own
        return (
            f"window(before = {window - 1}, after = 0)" if causal else f"window(radius = {window})"
        )
    if kind == "chunked_attention":
        return f"block(size = {_size(given, 'attention_chunk_size')})"
    raise AttnSpecError(
        f"layers of the type `{kind}` are no spec: what they read is decided by their own parts, or"
        " they have no scores"
    )


def _scores(given: Config) -> list[str]:
    """How scores are changed: the scale, the soft cap, and the sinks."""
    scale = _scale(given)
    lines = [] if scale is None else [f"scale {scale}"]
    if given.get("attn_logit_softcapping") is not None:
        lines.append(f"score softcap(cap = {given['attn_logit_softcapping']})")
    if given.get("model_type") == "gpt_oss":
        # the model hands the logit of each head over, as `s_aux`
        lines.append("normalize softmax1")
    if given.get("model_type") == "bloom":
        lines.append("score alibi()")
    return lines


def _scale(given: Config) -> str | None:
    """The scale of scores where it is not 1 / sqrt(d)."""
    kind = given.get("model_type")
    if given.get("query_pre_attn_scalar") is not None:
        return f"1 / sqrt({given['query_pre_attn_scalar']})"
    if kind == "granite":
        return str(given.get("attention_multiplier", 1.0))
    if kind == "gemma3n_text":
        return "1"
    if kind != "gpt2":
        return None
    by_layer = " / (layer + 1)" if given.get("scale_attn_by_inverse_layer_idx") else ""
    if not given.get("scale_attn_weights", True):
        return f"1{by_layer}"
    if not by_layer:
        return None
    width, heads = given.get("n_embd", 768), given.get("n_head", 12)
    return f"1 / sqrt({width // heads}){by_layer}"


def _count_of(given: Config) -> int:
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if given.get(name) is not None:
            return _size(given, name)
    types = given.get("layer_types")
    if isinstance(types, Sequence):
        return len(types)
    raise AttnSpecError("the config does not say how many layers there are: `num_hidden_layers`")


def _size(given: Config, name: str) -> int:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AttnSpecError(f"`{name}` must be a count from 1 on, got {value!r}")
    return value


# --- models of their own --------------------------------------------------------------------------


def _longformer(given: Config) -> Layers:
    count, window = _count_of(given), given.get("attention_window", 512)
    windows = [window] * count if isinstance(window, int) else list(window)
    if len(windows) != count or any(size % 2 or size < 2 for size in windows):
        raise AttnSpecError(f"`attention_window` must be even, one for each layer, got {window!r}")
    attends = tuple(f"window(radius = {size // 2}) | global(important)" for size in windows)
    return Layers(attends, False, ("important: tokens",))


def _big_bird(given: Config) -> Layers:
    count = _count_of(given)
    if given.get("attention_type") == "original_full":
        return Layers(("full",) * count, bool(given.get("is_decoder")))
    if given.get("is_decoder"):
        raise AttnSpecError("transformers has no block-sparse BigBird as a decoder")
    size, blocks = _size(given, "block_size"), _size(given, "num_random_blocks")
    near = f"block(size = {size}, before = 1, after = 1)"
    ends = f"global(first({size}) | last({size}))"
    drawn = f"random_blocks(size = {size}, blocks = {blocks}, seed = 0)"
    return Layers((f"{near} | {ends} | {drawn}",) * count, False)


def _gpt_neo(given: Config) -> Layers:
    types = given.get("attention_layers")
    if types is None:
        types = [
            kind
            for kinds, times in given.get("attention_types", ())
            for _ in range(times)
            for kind in kinds
        ]
    known = {
        "global": "full",
        "local": f"window(before = {_size(given, 'window_size') - 1}, after = 0)",
    }
    for kind in types:
        if kind not in known:
            raise AttnSpecError(f"GPT-Neo's layers are global or local, got {kind!r}")
    # it does not scale its scores
    return Layers(tuple(known[kind] for kind in types), True, (), ("scale 1",))


def _reformer(given: Config) -> Layers:
    known = {"local": _chunks, "lsh": _hashed_chunks}
    types = given.get("attn_layers", ())
    for kind in types:
        if kind not in known:
            raise AttnSpecError(f"Reformer's layers are local or lsh, got {kind!r}")
    attends = tuple(known[kind](given) for kind in types)
    return Layers(attends, bool(given.get("is_decoder", False)))


def _chunks(given: Config) -> str:
    size = _size(given, "local_attn_chunk_length")
    before, after = given.get("local_num_chunks_before", 1), given.get("local_num_chunks_after", 0)
    return f"block(size = {size}, before = {before}, after = {after})"


def _hashed_chunks(given: Config) -> str:
    chunk, rounds = _size(given, "lsh_attn_chunk_length"), given.get("num_hashes", 1)
    buckets = given.get("num_buckets")
    if isinstance(buckets, Sequence):
        buckets = prod(buckets)
    before, after = given.get("lsh_num_chunks_before", 1), given.get("lsh_num_chunks_after", 0)
    if (before, after) != (1, 0):
        raise AttnSpecError(
            f"`lsh` reads the own and the previous chunk, got {before} before and {after} after"
        )
    written = "" if buckets is None else f"buckets = {buckets}, "
    return (
        f"lsh({written}rounds = {rounds}, chunk = {chunk}, seed = 0, scale = unit,"
        " bucket_mask = false, multiplicity = true)"
    )


def _nystromformer(given: Config) -> Layers:
    landmarks, conv = _size(given, "num_landmarks"), given.get("conv_kernel_size") or 0
    attend = f"nystrom(landmarks = {landmarks}, iterations = 6, conv = {conv})"
    return Layers((attend,) * _count_of(given), False)


def _fnet(given: Config) -> Layers:
    return Layers(("fourier()",) * _count_of(given), False)


def _t5(given: Config, stack: str) -> Layers:
    """T5 and LongT5: a learned bias of the distance, and no scale."""
    buckets = given.get("relative_attention_num_buckets", 32)
    distance = given.get("relative_attention_max_distance", 128)
    local = given.get("encoder_attention_type") == "local"
    if stack == "encoder" and given["model_type"] == "longt5" and not local:
        raise AttnSpecError(
            "LongT5's transient-global attention reads sums of blocks beside tokens; its local"
            " encoder is a spec"
        )
    heads = f"heads {_size(given, 'num_heads')}"
    lines = (heads, "scale 1", f"score bias(buckets = {buckets}, max_distance = {distance})")
    if stack == "decoder":
        count = given.get("num_decoder_layers") or _count_of(given)
        return Layers(("full",) * count, True, (), lines)
    attend = "full"
    if given["model_type"] == "longt5":
        attend = f"window(radius = {_size(given, 'local_radius')})"
    return Layers((attend,) * _count_of(given), False, (), lines)


def _encoder_decoder(given: Config, stack: str) -> Layers:
    """BART and its like: every token of the text, every earlier one of what is written."""
    count = given.get(f"{stack}_layers") or _count_of(given)
    return Layers(("full",) * count, stack == "decoder")


def _stack(kind: str, part: str | None) -> str:
    if part not in ("encoder", "decoder"):
        raise AttnSpecError(
            f"`{kind}` has an encoder and a decoder, each with a spec of its own: say `part ="
            f" 'encoder'` or 'decoder', got {part!r}"
        )
    return part


_OWN: dict[str, Callable[[Config], Layers]] = {
    "longformer": _longformer,
    "big_bird": _big_bird,
    "gpt_neo": _gpt_neo,
    "reformer": _reformer,
    "nystromformer": _nystromformer,
    "fnet": _fnet,
}

_OF_TWO: dict[str, Callable[[Config, str], Layers]] = {
    "t5": _t5,
    "mt5": _t5,
    "longt5": _t5,
    "bart": _encoder_decoder,
    "mbart": _encoder_decoder,
    "pegasus": _encoder_decoder,
    "marian": _encoder_decoder,
    "whisper": _encoder_decoder,
}
