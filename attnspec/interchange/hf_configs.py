"""`attnspec.from_hf_config`: what the layers of a model of transformers read, from its config.

Windows mean what transformers makes of them: a causal `sliding_window = w` keeps w keys, with the
query's own; both ways it keeps w on each side. The spec says how scores are changed, too: soft
caps, a scale of the config's own, learned sinks as `softmax1`.

The tables say which type reads which field; a field that changes pairs or scores and that no spec
says is refused by its name. Source: transformers 5, masking_utils.py and the models' files; tests
hold tiny models of each type against their specs (tests/interchange/test_configs.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, log, prod
from typing import Any

from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import AttnSpecError, hinted, ranges

# --- what each type reads -------------------------------------------------------------------------


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BY_TYPES = _names(
    "afmoe cohere2 cohere2_moe cwm dots1 exaone4 exaone_moe gemma2 gemma3_text gemma3n_text"
    " gemma4_text gpt_oss granite_swa granitemoe_swa kolibri1 laguna lfm2 llama4_text mellum"
    " mimo_v2_flash ministral modernbert modernbert-decoder olmo3 qwen2 qwen2_moe qwen3 smollm3"
    " vaultgemma"
)
"""Types that read `layer_types`."""

_BY_WINDOW = _names("ministral3 mistral mixtral phi3 qwen3_moe starcoder2")
"""Types that read one `sliding_window` for all layers."""

_LATENT = _names("axk1 deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3 youtu")
"""Types that make keys and values of latent rows, and read a factor of scores beside YaRN's."""

_CAUSAL = (
    (_BY_TYPES - {"modernbert"})
    | _BY_WINDOW
    | _LATENT
    | _names(
        "apertus arcee aria_text biogpt bitnet bloom codegen cohere ctrl dbrx diffllama ernie4_5"
        " ernie4_5_moe falcon flex_olmo gemma glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox"
        " gpt_neox_japanese gptj granite granitemoe granitemoeshared helium hunyuan_v1_dense"
        " hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe llama minimax_m2 moshi mpt nanochat"
        " nemotron olmo olmo2 olmoe opt persimmon phi seed_oss solar_open stablelm xglm"
    )
)
"""Types whose layers read no later token, unless the config says `is_causal = False`."""

_ONE_WAY = _names("bloom llama4_text modernbert-decoder mpt nemotron stablelm")
"""Those of them that do not read both ways with `is_causal = False`, or not in each of
transformers' implementations, or whose scores are then other ones."""

_DECODERS = _names("bert camembert data2vec-text electra esm roberta xlm-roberta")
"""Types whose layers read both ways, and no later token with `is_decoder`."""

_BOTH_WAYS = _DECODERS | _names(
    "albert beit clip_vision_model deit dinov2 distilbert ijepa layoutlm modernbert mpnet"
    " siglip_vision_model splinter vit"
)
"""Types whose layers read both ways."""

_PLAIN_TEXTS = _names(
    "aria aya_vision cohere2_vision gemma3n got_ocr2 idefics2 idefics3 internvl lfm2_vl llama4"
    " llava llava_next llava_next_video llava_onevision mistral3 smolvlm video_llava vipllava"
)
"""Types whose text model reads images and text alike, as its own config says."""


@dataclass(frozen=True)
class Refused:
    """A field that no spec says, of some types or, without any, of all: what it does, what it says
    where it changes nothing, and around which types it is not read."""

    name: str
    why: str
    kinds: Collection[str] = ()
    harmless: tuple[object, ...] = (False,)
    unless: Collection[str] = ()

    def applies(self, config: Config, within: str) -> bool:
        """Whether a config, or one inside another of a type, says what no spec says."""
        value = config.get(self.name)
        if value is None or value in self.harmless or within in self.unless:
            return False
        supported = config.kind in _KNOWN or self.why is _UNREAD
        return not (self.kinds and supported) or bool({config.kind, within} & {*self.kinds})


_INDEXER = (
    "makes layers choose keys by an indexer; `convert(model, spec)` keeps the model's choices"
    " within a spec, and `chosen(x)` in a spec takes choices as an input"
)
_UNREAD = "is ignored by transformers' model of this type; remove it from the config"
_A_TABLE = "adds numbers of a learned table of two-dimensional distances to scores"

_REFUSED = (
    Refused("index_topk", _INDEXER, harmless=()),
    Refused("index_topk_blocks", _INDEXER, harmless=()),
    Refused(
        "attn_temperature_tuning",
        "scales queries by their position in layers without rotary positions",
        ("llama4_text",),
    ),
    Refused(
        "use_bidirectional_attention",
        "is honoured by only some of transformers' attention implementations",
        ("gemma", "gemma2", "gemma3", "gemma3n_text"),
        unless=("paligemma",),
    ),
    Refused("use_relative_position_bias", _A_TABLE, ("beit",)),
    Refused("use_shared_relative_position_bias", _A_TABLE, ("beit",)),
    Refused(
        "alibi",
        "adds to scores a bias rounded to bfloat16, which no spec describes",
        ("falcon",),
    ),
    Refused("attn_config.alibi", _UNREAD, ("mpt",), (True,)),
    Refused("attn_config.alibi_bias_max", _UNREAD, ("mpt",), (8,)),
    Refused("attn_config.prefix_lm", _UNREAD, ("mpt",)),
    Refused("attn_config.attn_uses_sequence_id", _UNREAD, ("mpt",)),
    Refused(
        "rope_parameters.llama_4_scaling_beta", "scales queries by their position", ("ministral3",)
    ),
    Refused("attn_logit_softcapping", _UNREAD, ("gemma3_text",), ()),
    Refused("relative_attention_num_buckets", _UNREAD, ("mpnet",), (32,)),
)

_SCORES = (
    ("query_pre_attn_scalar", ("gemma2", "gemma3_text", "vaultgemma"), "scale 1 / sqrt({})"),
    (
        "attention_multiplier",
        _names("granite granite_swa granitemoe granitemoe_swa granitemoeshared hyperclovax"),
        "scale {}",
    ),
    ("attn_config.softmax_scale", ("mpt",), "scale {}"),
    ("attn_logit_softcapping", ("gemma2", "vaultgemma"), "score softcap(cap = {})"),
)
"""Fields that change scores, the types that read them, and what a spec says of them."""

_ALWAYS = {
    "gemma3n_text": ("scale 1",),
    "gemma4_text": ("scale 1",),
    # the model hands the logit of each head over, as `s_aux`
    **dict.fromkeys(("gpt_oss", "granite_swa", "granitemoe_swa"), ("normalize softmax1",)),
    "bloom": ("score alibi()",),
    "mpt": ("score alibi()",),
}
"""What changes the scores of a type whatever its config says."""


class Config:
    """The fields of a config of transformers, or of a dictionary whose type it does not know."""

    def __init__(self, fields: object) -> None:
        self._fields = fields

    def get(self, name: str, default: Any = None) -> Any:
        """What a field says, `a.b` one of a config inside; the default also where it is None."""
        name, _, inner = name.partition(".")
        fields = self._fields
        value = fields.get(name) if isinstance(fields, Mapping) else getattr(fields, name, None)
        if value is not None and inner:
            return Config(value).get(inner, default)
        return default if value is None else value

    @property
    def kind(self) -> str:
        return str(self.get("model_type", ""))

    @property
    def has_a_class(self) -> bool:
        """Whether transformers knows the type."""
        return not isinstance(self._fields, Mapping)

    @property
    def layers_differ(self) -> bool:
        """Whether layers have fields of their own, other than the sizes of Gemma 4's heads."""
        fields: Any = self._fields
        if isinstance(fields, Mapping):
            return bool(fields.get("per_layer_config"))
        if not getattr(fields, "is_heterogeneous", False):
            return False
        differing = set().union(*fields.to_dict()["per_layer_config"].values())
        return self.kind != "gemma4_text" or not differing <= {"head_dim", "num_key_value_heads"}


@dataclass(frozen=True)
class Layers:
    """What is written of a model: an `attend` for each layer, and what holds for all of them."""

    attends: tuple[str, ...]
    causal: bool
    inputs: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


def from_hf_config(config: object, *, causal: bool | None = None, part: str | None = None) -> Spec:
    """The spec of a model of transformers: of its config, an object or a dictionary.

    A dictionary is read as its class in transformers reads it. Where there is a `text_config`, the
    spec is that of the text model; images and prompts that are read both ways are its inputs.
    `part` is "encoder" or "decoder" where a model has both. `causal` says of a type that is not
    known here whether its layers read later tokens. Raises ValueError with the reason for layers
    and for fields that no spec says, and for settings that leave pairs open.
    """
    if causal is not None and not isinstance(causal, bool):
        raise TypeError(f"`causal` must be True or False, got {type(causal).__name__}")
    whole = Config(_as_its_class_reads_it(config))
    text = whole.get("text_config")
    inner = whole if text is None else Config(_as_its_class_reads_it(text))
    _require_sayable(whole)
    _require_sayable(inner, whole.kind)
    layers = _layers(inner, causal, part)
    if text is not None:
        layers = _inside(whole, inner, layers, causal)
    if not layers.attends:
        raise AttnSpecError("the config has no layers: there must be at least one")
    return parse(_text(whole.kind, layers))


def _as_its_class_reads_it(config: object) -> object:
    """A config, made of a dictionary where transformers knows its type."""
    if not isinstance(config, Mapping):
        if hasattr(config, "to_dict"):
            return config
        raise TypeError(f"a config or its dictionary is needed, got {type(config).__name__}")
    kind = str(config.get("model_type", ""))
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        if kind not in _KNOWN:
            return config
        raise AttnSpecError(
            f"a config of `{kind}` as a dictionary needs transformers, whose class fills in and"
            " computes fields: install it"
        ) from None
    if kind not in CONFIG_MAPPING:
        return config
    maker = CONFIG_MAPPING[kind]
    # what a class computes is null in some files
    fields = {
        name: copy.deepcopy(value)
        for name, value in config.items()
        if value is not None or not isinstance(getattr(maker, name, None), property)
    }
    try:
        return maker.from_dict(fields)
    except Exception as error:
        reason = str(error).strip().replace("\n", " ")
        raise AttnSpecError(
            f"transformers refuses this config of `{kind}`: {reason:.200}"
        ) from error


def _require_sayable(config: Config, within: str = "") -> None:
    """Refuse fields that no spec says."""
    if config.layers_differ:
        raise AttnSpecError("`per_layer_config`, fields of single layers, cannot become a spec")
    for rule in _REFUSED:
        if rule.applies(config, within):
            setting = f"`{rule.name} = {config.get(rule.name)}`"
            raise AttnSpecError(f"a config with {setting} is refused: this field {rule.why}")


def _layers(config: Config, causal: bool | None, part: str | None) -> Layers:
    kind = config.kind
    if kind in _OF_TWO:
        if part not in ("encoder", "decoder"):
            raise AttnSpecError(
                f"`{kind}` has an encoder and a decoder, each with a spec of its own: say `part ="
                f" 'encoder'` or 'decoder', got {part!r}"
            )
        layers = _OF_TWO[kind](config, part)
    elif part is not None:
        why = "has one stack of layers" if kind in _KNOWN else "is not known"
        raise AttnSpecError(
            f"`part` is for known encoder-decoders; `{kind}` {why}: leave `part` out"
        )
    elif kind in _OWN:
        layers = _OWN[kind](config)
    else:
        types, back = _types(config), _reads_back(config, causal)
        attends = tuple(_layer(each, config, back) for each in types)
        if kind == "mimo_v2_flash":
            # sinks stand in sliding layers alone
            attends = tuple(f"{x} normalize softmax{'1' * (x != 'full')}" for x in attends)
        layers = Layers(attends, back, lines=tuple(_scores(config)))
    _require_direction(config, layers.causal)
    return layers


# --- which way layers read ------------------------------------------------------------------------


def _reads_back(config: Config, causal: bool | None) -> bool:
    """Whether layers read no later token."""
    kind = config.kind
    if causal is not None:
        return causal
    if kind not in _CAUSAL | _BOTH_WAYS:
        message = (
            f"the model type {kind!r} is not known; pass `causal=True` or `causal=False` if"
            " `layer_types` and `sliding_window` describe its layers"
        )
        if config.has_a_class:  # no misspelling
            raise AttnSpecError(message)
        raise AttnSpecError(hinted(message, kind, sorted(_KNOWN)))
    turned = _is_turned(config) or (kind not in _ONE_WAY and config.get("is_causal") is False)
    back = kind in _CAUSAL or (kind in _DECODERS and config.get("is_decoder") is True)
    return back and not turned


def _is_turned(config: Config) -> bool:
    """Whether a Gemma 3 reads both ways by a flag of its own, which takes one less of a window."""
    turned = config.kind == "gemma3_text" and config.get("use_bidirectional_attention", False)
    return bool(turned) and config.get("is_causal") is not False


def _require_direction(config: Config, back: bool) -> None:
    """Refuse `is_causal` where it is not what layers do."""
    says = config.get("is_causal")
    if says is not None and bool(says) is not back:
        reads = "no later token" if back else "both ways"
        raise AttnSpecError(
            f"layers of `{config.kind}` read {reads}, and not every implementation of transformers"
            f" honours `is_causal = {says}`, or keeps the scores with it: leave `is_causal` out"
        )


# --- layers by their types ------------------------------------------------------------------------


def _types(config: Config) -> list[str]:
    """What `layer_types`, or the one `sliding_window`, tell of layers, where the type reads them;
    types that no spec says are refused, whichever way layers read."""
    kind, count = config.kind, _count_of(config)
    types = config.get("layer_types") if kind in _BY_TYPES or kind not in _KNOWN else None
    if types is None:
        unknown = kind not in _KNOWN and config.get("use_sliding_window", True)
        window = config.get("sliding_window") if kind in _BY_WINDOW or unknown else None
        types = ["full_attention" if window is None else "sliding_attention"] * count
    if len(types) != count:
        raise AttnSpecError(
            f"`layer_types` has {len(types)} entries, and the config {count} layers: write one"
            " entry for each layer"
        )
    for each in types:
        if each not in ("full_attention", "sliding_attention", "chunked_attention"):
            raise AttnSpecError(
                f"layers of the type `{each}` cannot become a spec: only full, sliding and chunked"
                " attention can"
            )
    return list(types)


def _layer(kind: str, config: Config, causal: bool) -> str:
    if kind == "full_attention":
        return "full"
    if kind == "sliding_attention":
        window = _size(config, "sliding_window")
        if causal:
            return f"window(before = {window - 1}, after = 0)"
        return f"window(radius = {window - 1 if _is_turned(config) else window})"
    return f"block(size = {_size(config, 'attention_chunk_size')})"


def _scores(config: Config) -> Iterator[str]:
    """How scores are changed: the scale, the soft cap, the sinks, what is added to them."""
    kind = config.kind
    for name, kinds, text in _SCORES:
        value = config.get(name)
        if value is not None and (kind in kinds or kind not in _KNOWN):
            yield text.format(value)
    yield from _ALWAYS.get(kind, ())
    if kind == "mpnet":
        yield f"heads {_size(config, 'num_attention_heads')}"
        yield "score bias(buckets = 32, max_distance = 128)"
    if kind in ("gpt2", "gpt_bigcode"):
        yield from _scale_of_gpt2(config)
    if kind in _LATENT or kind not in _KNOWN:
        yield from _scale_beside_yarn(config)


def _scale_of_gpt2(config: Config) -> Iterator[str]:
    by_layer = " / (layer + 1)" if config.get("scale_attn_by_inverse_layer_idx") else ""
    if not config.get("scale_attn_weights", True):
        yield f"scale 1{by_layer}"
    elif by_layer:
        width, heads = _size(config, "n_embd"), _size(config, "n_head")
        yield f"scale 1 / sqrt({width // heads}){by_layer}"


def _scale_beside_yarn(config: Config) -> Iterator[str]:
    """The scale of a type of `_LATENT` whose scores are multiplied beside rotary positions."""
    all_dim = config.get("rope_parameters.mscale_all_dim", 0)
    if all_dim and config.get("rope_parameters.rope_type", "default") != "default":
        width = _size(config, "qk_nope_head_dim") + _size(config, "qk_rope_head_dim")
        turned = 0.1 * all_dim * log(max(1.0, config.get("rope_parameters.factor", 1.0))) + 1
        yield f"scale {width**-0.5 * turned**2}"


def _count_of(config: Config) -> int:
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if config.get(name) is not None:
            return _size(config, name)
    types = config.get("layer_types")
    if isinstance(types, Sequence):
        return len(types)
    raise AttnSpecError("the config does not say how many layers there are: `num_hidden_layers`")


def _size(config: Config, name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AttnSpecError(f"`{name}` must be a count from 1 on, got {value!r}")
    return value


# --- a text model inside another ------------------------------------------------------------------


def _inside(whole: Config, text: Config, layers: Layers, causal: bool | None) -> Layers:
    """What the layers of a text model read with the masks that the model around it makes."""
    kind = whole.kind
    if kind == "paligemma" and layers.causal:
        # the prompt, with its images, is read both ways
        both = "{} | prefix(prompt) & transpose(prefix(prompt))"
        return _widened(layers, "causal | prefix(prompt)", both, "prompt: length")
    if kind == "gemma3":
        if not layers.causal:
            raise AttnSpecError(
                "layers of `gemma3` read both ways only in images: leave `is_causal = False` out"
            )
        # each image is read both ways: `image` is its number, below 0 for text
        same = "image(q) == image(k) and image(q) >= 0"
        cut = f"{{}} | where({same} and q - k < {text.get('sliding_window')})"
        return _widened(layers, f"causal | where({same})", cut, "image: ids")
    if kind not in _PLAIN_TEXTS | {"paligemma"} and causal is None:
        raise AttnSpecError(
            f"what `{kind}` adds to the masks of its text model is not known here:"
            " `config.text_config` is the text model alone"
        )
    return layers


def _widened(layers: Layers, full: str, cut: str, read: str) -> Layers:
    """Layers that read some later tokens by an input: those of all pairs, and others."""
    attends = tuple(full if x == "full" else cut.format(x) for x in layers.attends)
    return replace(layers, attends=attends, causal=False, inputs=(read,))


def _text(kind: str, layers: Layers) -> str:
    """The text: what most layers do, and the others by their numbers."""
    name = "".join(c if c.isalnum() else "_" for c in kind) or "model"
    lines = [f"attention {name} {{"]
    lines += ["    causal"] if layers.causal else []
    lines += [f"    layers {len(layers.attends)}", *(f"    input {each}" for each in layers.inputs)]
    usual = max(dict.fromkeys(layers.attends), key=layers.attends.count)
    lines.append(f"    attend {usual}")
    for other in dict.fromkeys(each for each in layers.attends if each != usual):
        numbers = [at for at, each in enumerate(layers.attends) if each == other]
        lines.append(f"    layer {ranges(numbers)} {{ attend {other} }}")
    return "\n".join([*lines, *(f"    {line}" for line in layers.lines), "}", ""])


# --- models of their own --------------------------------------------------------------------------


def _longformer(config: Config) -> Layers:
    count, window = _count_of(config), config.get("attention_window", 512)
    windows = [window] * count if isinstance(window, int) else list(window)
    if len(windows) != count or any(size % 2 or size < 2 for size in windows):
        must = "must be an even number from 2 on, or one for each layer in a list"
        raise AttnSpecError(f"`attention_window` {must}, got {window!r}")
    attends = tuple(f"window(radius = {size // 2}) | global(important)" for size in windows)
    return Layers(attends, False, ("important: tokens",))


def _big_bird(config: Config) -> Layers:
    count = _count_of(config)
    if config.get("attention_type") == "original_full":
        return Layers(("full",) * count, bool(config.get("is_decoder")))
    if config.get("is_decoder"):
        raise AttnSpecError("a BigBird decoder must have `attention_type = 'original_full'`")
    size, blocks = _size(config, "block_size"), _size(config, "num_random_blocks")
    near = f"block(size = {size}, before = 1, after = 1)"
    ends = f"global(first({size}) | last({size}))"
    drawn = f"random_blocks(size = {size}, blocks = {blocks}, seed = 0)"
    return Layers((f"{near} | {ends} | {drawn}",) * count, False)


def _gpt_neo(config: Config) -> Layers:
    near = f"window(before = {_size(config, 'window_size') - 1}, after = 0)"
    layouts = {"global": lambda config: "full", "local": lambda config: near}
    attends = _by_layouts(config, "GPT-Neo", "attention_layers", layouts)
    # it does not scale its scores
    return Layers(attends, True, (), ("scale 1",))


def _by_layouts(
    config: Config, model: str, field: str, layouts: Mapping[str, Callable[[Config], str]]
) -> tuple[str, ...]:
    """What layers of two kinds read, which a field names one by one."""
    for kind in config.get(field, ()):
        if kind not in layouts:
            raise AttnSpecError(f"{model}'s layers are {' or '.join(layouts)}, got {kind!r}")
    return tuple(layouts[kind](config) for kind in config.get(field, ()))


def _reformer(config: Config) -> Layers:
    layouts = {"local": _chunks, "lsh": _hashed_chunks}
    attends = _by_layouts(config, "Reformer", "attn_layers", layouts)
    return Layers(attends, bool(config.get("is_decoder", False)))


def _chunks(config: Config) -> str:
    size = _size(config, "local_attn_chunk_length")
    before = config.get("local_num_chunks_before", 1)
    after = config.get("local_num_chunks_after", 0)
    if config.get("is_decoder"):
        return f"block(size = {size}, before = {before}, after = {after})"
    # chunks are a ring: the first reads the last; padding fills up chunks of each type of layer
    sizes = {_size(config, f"{kind}_attn_chunk_length") for kind in config.get("attn_layers", ())}
    chunks = f"({lcm(*sizes) // size} * ceil(n / {lcm(*sizes)}))"
    back, ahead = (f"({a} // {size} - {b} // {size}) % {chunks}" for a, b in ("qk", "kq"))
    return f"where({back} <= {before} or {ahead} <= {after})"


def _hashed_chunks(config: Config) -> str:
    chunk, rounds = _size(config, "lsh_attn_chunk_length"), config.get("num_hashes", 1)
    buckets = config.get("num_buckets")
    if isinstance(buckets, Sequence):
        buckets = prod(buckets)
    before, after = config.get("lsh_num_chunks_before", 1), config.get("lsh_num_chunks_after", 0)
    if (before, after) != (1, 0):
        raise AttnSpecError(
            f"`lsh` reads the own and the previous chunk, got {before} before and {after} after"
        )
    written = "" if buckets is None else f"buckets = {buckets}, "
    return (
        f"lsh({written}rounds = {rounds}, chunk = {chunk}, seed = 0, scale = unit,"
        " bucket_mask = false, multiplicity = true)"
    )


def _nystromformer(config: Config) -> Layers:
    landmarks, conv = _size(config, "num_landmarks"), config.get("conv_kernel_size", 0)
    attend = f"nystrom(landmarks = {landmarks}, iterations = 6, conv = {conv})"
    return Layers((attend,) * _count_of(config), False)


def _t5(config: Config, stack: str) -> Layers:
    """T5 and LongT5: a learned bias of the distance, and no scale."""
    buckets = config.get("relative_attention_num_buckets", 32)
    distance = config.get("relative_attention_max_distance", 128)
    local = config.get("encoder_attention_type") == "local"
    if stack == "encoder" and config.kind == "longt5" and not local:
        raise AttnSpecError(
            "LongT5's transient-global attention also reads sums of blocks, which no spec"
            " describes; only `encoder_attention_type = 'local'` can become a spec"
        )
    heads = f"heads {_size(config, 'num_heads')}"
    lines = (heads, "scale 1", f"score bias(buckets = {buckets}, max_distance = {distance})")
    if stack == "decoder":
        count = config.get("num_decoder_layers") or _count_of(config)
        return Layers(("full",) * count, True, (), lines)
    attend = "full"
    if config.kind == "longt5":
        attend = f"window(radius = {_size(config, 'local_radius')})"
    return Layers((attend,) * _count_of(config), False, (), lines)


def _encoder_decoder(config: Config, stack: str) -> Layers:
    """BART and its like: every token of the text, every earlier one of what is written."""
    count = config.get(f"{stack}_layers") or _count_of(config)
    return Layers(("full",) * count, stack == "decoder")


_OWN: dict[str, Callable[[Config], Layers]] = {
    "longformer": _longformer,
    "big_bird": _big_bird,
    "gpt_neo": _gpt_neo,
    "reformer": _reformer,
    "nystromformer": _nystromformer,
    "fnet": lambda config: Layers(("fourier()",) * _count_of(config), False),
}

_OF_TWO: dict[str, Callable[[Config, str], Layers]] = {
    **dict.fromkeys(("t5", "mt5", "longt5"), _t5),
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian", "whisper"), _encoder_decoder),
}

_KNOWN = _CAUSAL | _BOTH_WAYS | _OWN.keys() | _OF_TWO.keys()
"""The types whose fields are known here."""
