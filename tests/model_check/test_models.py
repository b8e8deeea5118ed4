"""Running models compared with specs: right models are equal, and each fault is found and named."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import TestCase

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from model_families import FAMILIES
from model_settings import MODELS, SETTINGS, build, outcome, shown, uncompiled
from oracle.tree import expression
from population import spec_of
from specs import drawn, graphs
from sweeps import checkered, few
from tiny_models import bert, llama, names_restored, padded, tokens, transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import attnspec
from attnspec import verify_model
from attnspec.cli import main
from attnspec.integrations.transformers import convert, register
from attnspec.model_check import Run
from attnspec.model_check.wanted import documents
from attnspec.testing import assert_attends

_WARNINGS = ("flex_attention called without", "The PyTorch API of nested", "enable_nested_tensor")
pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in _WARNINGS]

FULL = attnspec.parse("attention all { attend full }")
CAUSAL = attnspec.parse("attention past { causal attend full }")
NEAR = attnspec.parse("attention near { causal attend window(before = 3, after = 0) }")
PER_HEAD = attnspec.parse("attention a { heads 4 attend full head 0 { attend self } }")
DOCUMENTS = attnspec.parse("attention docs { input document: ids causal attend same(document) }")
CROSS = attnspec.parse("attention both { cross attend full }")
CHOSEN = attnspec.parse("attention few { causal attend topk(keys = 3) }")
SUMS = attnspec.parse("attention sums { causal attend linear() }")
B, N, H, D = 2, 10, 4, 16
POSITIONS = torch.cat([torch.arange(5), torch.arange(7)])[None]
ONES = torch.ones(2, 12, dtype=torch.long)
_FAMILIES = ("DebertaV2", "XLNet")
BY_STEM = {family.stem: family for family in FAMILIES}
Attend = Callable[..., Any]


def mask_of(spec: attnspec.Spec, n: int = N, layer: int = 0) -> Tensor:
    """bool [1, H, n, n]."""
    masks = [spec.mask(n, layer, head if spec.heads else 0) for head in range(spec.heads or H)]
    return torch.from_numpy(np.stack(masks))[None]


def sdpa(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def written(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return (q @ k.mT / 2).masked_fill(~mask, float("-inf")).softmax(-1) @ v


def letters(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) + torch.where(mask, 0.0, -1e9)
    return torch.einsum("bhqk,bhkd->bhqd", nn.functional.softmax(scores, dim=-1), v)


def masked_after(weigh: Any, divided: bool = True) -> Attend:
    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        weights = weigh(q @ k.mT) * mask
        return (weights / weights.sum(-1, keepdim=True) if divided else weights) @ v

    return attend


renormalised, exponentials = masked_after(lambda x: x.softmax(-1)), masked_after(torch.exp)
undivided = masked_after(lambda x: x.softmax(-1), divided=False)


def through_a_view(q: Any, k: Any, v: Any, mask: Any) -> Any:
    weights = (q @ k.mT).masked_fill(~mask, float("-inf")).softmax(-1)
    every = torch.zeros(weights.shape)
    every[:, :][:] = weights
    return every @ v


def flex(q: Any, k: Any, v: Any, mask: Any) -> Any:
    mask = mask.expand(len(q), q.shape[1], -1, -1)
    scored: Any = lambda s, *at: torch.where(mask[at], s, -torch.inf)  # noqa: E731
    return flex_attention(q, k, v, score_mod=scored)


class SomeAttention(nn.Module):
    """Projections around an attention with a mask [1, H, n, n]; G heads of keys are repeated."""

    def __init__(self, attend: Attend, mask: Tensor, groups: int = 0, size: int = 4) -> None:
        super().__init__()
        heads, groups = mask.shape[1], groups or mask.shape[1]
        self.q, self.kv = nn.Linear(D, size * heads), nn.Linear(D, 2 * size * groups)
        self.out = nn.Linear(size * heads, D)
        self.attend, self.mask, self.groups = attend, mask, groups
        self.repeat: Any = lambda x: x.repeat_interleave(heads // groups, 1)

    def forward(self, x: Tensor) -> Any:
        q = self.q(x).unflatten(2, (self.mask.shape[1], -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(2, (2 * self.groups, -1)).transpose(1, 2).chunk(2, 1)
        out = self.attend(q, self.repeat(k), self.repeat(v), self.mask)
        # of rows that read nothing some give NaN
        return self.out(out.transpose(1, 2).flatten(2).nan_to_num())


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def net(spec: attnspec.Spec, wrong: Tensor | None = None, attend: Attend = sdpa) -> Net:
    """Three layers of a spec, the second with a wrong mask."""
    torch.manual_seed(0)
    masks = [mask_of(spec, layer=layer) for layer in range(3)]
    masks[1] = masks[1] if wrong is None else wrong
    return Net(*(SomeAttention(attend, mask) for mask in masks))


def states(n: int = N) -> Tensor:
    return torch.randn(B, n, D, generator=torch.Generator().manual_seed(1))


def changed(spec: attnspec.Spec, *pairs: tuple[int, int], n: int = N) -> Tensor:
    """The mask of a spec with some pairs of head 2 turned round."""
    mask = mask_of(spec, n)
    for q, k in pairs:
        mask[0, 2, q, k] ^= True
    return mask


SEEN = (sdpa, written, letters, flex, renormalised)


@pytest.mark.parametrize(
    ("attend", "spec"), checkered([*SEEN, exponentials, through_a_view], [CAUSAL, NEAR])
)
def test_right_models_are_equal_and_wrong_pairs_found(attend: Attend, spec: attnspec.Spec) -> None:
    assert_attends(net(spec, attend=attend), spec, states())
    report = verify_model(net(spec, changed(spec, (4, 7), (9, 8)), attend), spec, states())
    head = 2 if attend in SEEN else None
    assert report.leaks == [(b, 1, head, 4, 7) for b in range(B)]
    # where heads are not separated the others still read it
    assert report.missing == [(b, 1, head, 9, 8) for b in range(B) if head]
    assert [layer.ok for layer in report.layers] == [True, False, True]


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        pytest.param(CAUSAL, lambda m: m.roll(1, -1), id="a mask off by one"),
        pytest.param(CAUSAL, torch.ones_like, id="causality dropped"),
        pytest.param(NEAR, lambda m: torch.ones_like(m).tril(), id="a window ignored"),
        pytest.param(PER_HEAD, lambda m: m.flip(1), id="heads in another order"),
    ],
)
def test_a_fault_is_found_in_its_layer_alone(spec: attnspec.Spec, fault: Any) -> None:
    assert verify_model(net(spec), spec, states()).ok
    right = mask_of(spec)
    report = verify_model(net(spec, fault(right)), spec, states())
    assert [layer.ok for layer in report.layers] == [True, False, True]
    leaks, missing = fault(right) & ~right, right & ~fault(right)
    for pairs, differs in ((report.leaks, leaks), (report.missing, missing)):
        expected = [(b, 1, *at[1:]) for b in range(B) for at in differs.nonzero().tolist()]
        assert pairs == expected


@pytest.mark.parametrize("attend", [sdpa, written])
def test_grouped_heads_repeated_wrongly_are_found(attend: Attend) -> None:
    right, wrong = (SomeAttention(attend, mask_of(CAUSAL), groups=2) for _ in range(2))
    wrong.repeat = lambda x: x.repeat(1, 2, 1, 1)
    report = verify_model(Net(right, wrong), CAUSAL, states())
    assert [layer.ok for layer in report.layers] == [True, False]
    assert "query head 1 reads the values of head 1: grouped heads are repeated" in str(report)


def test_a_block_list_that_is_ignored_is_found() -> None:
    # uncompiled, FlexAttention goes by the function alone, which lets everything through
    lists = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    blocks = BlockMask.from_kv_blocks(lists, lists, BLOCK_SIZE=N, seq_lengths=(N, N))
    attend: Attend = lambda q, k, v, m: flex_attention(q, k, v, block_mask=blocks)  # noqa: E731
    nothing = attnspec.parse("attention none { attend full - full }")
    report = verify_model(Net(SomeAttention(attend, mask_of(FULL))), nothing, states())
    assert report.leaks[0] == (0, 0, 0, 0, 0)
    assert report.layers[0].leak_count == B * H * N * N


@pytest.mark.parametrize("pair", [(399, 0), (3, 398)])
def test_one_pair_of_many_is_found_in_a_few_passes(pair: tuple[int, int]) -> None:
    n, x = 400, states(400)[:1]
    right, wrong = mask_of(CAUSAL, n), changed(CAUSAL, pair, n=n)
    model = Net(*(SomeAttention(sdpa, mask, size=32) for mask in (right, wrong)))
    report = verify_model(model, CAUSAL, x, exact=False)
    assert (report.missing or report.leaks) == [(0, 1, 2, *pair)]
    # all rows at once; where they differ 32 keys at once, again in float64 where a pair is missing
    assert [layer.passes for layer in report.layers] == [1, 1 + 13 * (1 + bool(report.missing))]


def test_uneven_weights_are_no_fault_in_a_long_sequence() -> None:
    n = 200
    distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    bias = torch.where(mask_of(CAUSAL, n), -0.9 * distance, -torch.inf)
    model = Net(SomeAttention(sdpa, bias))
    for exact in (None, True, False):
        assert verify_model(model, CAUSAL, states(n), exact=exact).ok


@pytest.mark.parametrize("seed", few(range(200), range(6)))
def test_random_specs_raise_no_false_alarm(seed: int) -> None:
    one, other = map(expression, drawn(8, seed, graphs)[-2:])
    causal = "causal " * (seed // 2 % 2)
    spec = spec_of(f"{causal}heads 2 attend {one} head 1 {{ attend {other} }}")
    model = net(spec, attend=(sdpa, written)[seed % 2])
    assert verify_model(model, spec, states(), exact=seed % 3 == 0).ok, spec.source


@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_of_torch(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(D, H, 32, batch_first=True, norm_first=norm_first)
    model, padding = nn.TransformerEncoder(layer, 2), torch.zeros(B, N, dtype=torch.bool)
    padding[0, 7:] = True
    report = verify_model(model, FULL, states(), src_key_padding_mask=padding)
    expected = [(f"layers.{i}.self_attn", True) for i in (0, 1)]
    assert [(layer.path, layer.ok) for layer in report.layers] == expected
    assert model.training
    later = torch.ones(N, N, dtype=torch.bool).triu(1)
    assert verify_model(model, CAUSAL, states(), mask=later, is_causal=True).ok
    attention = nn.MultiheadAttention(D, H)
    x = states().transpose(0, 1)
    assert verify_model(attention, CAUSAL, x, x, x, attn_mask=later).layers[0].heads == H


class FusedOtherwise(Net):
    """Computes something else as long as nobody looks."""

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.overrides.has_torch_function([x])
        return super().forward(x) if seen else super().forward(x) + x.sum(1, keepdim=True)


class RunningSum(nn.Linear):
    """Reads all earlier positions, by no function of attention."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.cumsum(1))


SELF = {"call": dict.fromkeys(("query", "key", "value"), states())}
EVERY = net(CAUSAL, torch.ones(1, H, N, N, dtype=torch.bool))
OWN = net(FULL, torch.eye(N, dtype=torch.bool).expand(1, H, N, N))
MIXED = attnspec.parse("attention m { layers 2 layer 0 { attend full } layer 1 { attend self } }")
IDS = torch.arange(N).ge(4).long().expand(B, -1)
PACKED = net(CAUSAL, mask_of(CAUSAL) & (IDS[0] == IDS[0][:, None]))
UNUSED, BROKEN = net(CAUSAL), net(CAUSAL)
UNUSED.spare = SomeAttention(sdpa, mask_of(CAUSAL))
nn.init.constant_(next(iter(BROKEN.layers)).kv.bias, torch.nan)  # type: ignore[arg-type,union-attr]
POOLED = type("PoolAttention", (nn.Linear,), {"forward": lambda self, x: x.mean(1)[:, None]})


@pytest.mark.parametrize(
    ("model", "spec", "settings", "words"),
    [
        *((BY_STEM[x].build(), FULL, {"call": BY_STEM[x].inputs()}, None) for x in _FAMILIES),
        (net(CAUSAL, attend=undivided), CAUSAL, {}, "sample 0, head 0, query 0, key 1"),
        (attnspec.SelfAttention(NEAR, D, H), NEAR, {}, None),
        (attnspec.SelfAttention(NEAR, D, H), CAUSAL, {}, "allowed and not read"),
        (attnspec.SelfAttention(CHOSEN, D, H), CHOSEN, {}, None),
        (attnspec.SelfAttention(SUMS, D, H), CAUSAL, {}, None),
        (attnspec.MultiheadAttention(D, H, spec=NEAR, batch_first=True), NEAR, SELF, None),
        (EVERY, CAUSAL, {}, r"key 1, weight 0\.\d+\n +360 of them: a later position is read"),
        (EVERY, CAUSAL, {"layers": 1}, "layer 0, .*: not asked for"),
        (EVERY, CAUSAL, {"layers": [0, 2]}, None),
        (EVERY, CAUSAL, {"layers": "layers.2"}, None),
        (EVERY, CAUSAL, {"layers": ["layers.7"]}, "no module is named 'layers.7': did you mean"),
        (EVERY, CAUSAL.source, {}, "a spec is needed, .*got str"),
        (Net(*OWN.layers[:2]), MIXED, {}, None),
        (OWN, MIXED, {}, "not checked: layer 2, .*: the spec has 2 layers"),
        (Net(OWN.layers[0]), MIXED, {}, "the spec has 2 layers, 1 ran"),
        (net(FULL), CROSS, {}, r"checked\nnot checked: layers.0 .*: it reads one sequence"),
        (PACKED, DOCUMENTS, {"inputs": {"document": IDS}, "layers": 1}, None),
        (PACKED, DOCUMENTS, {}, "missing: `document`"),
        (PACKED, DOCUMENTS, {"inputs": {"doc": IDS}}, "no input 'doc'; its inputs: document"),
        (PACKED, DOCUMENTS, {"inputs": {"document": IDS[0]}}, r"must be \[B, n\], got \[10\]"),
        (Net(SomeAttention(sdpa, mask_of(CAUSAL)[:, :2])), PER_HEAD, {}, "the model has 2 in"),
        (UNUSED, CAUSAL, {}, r"not checked: spare \(SomeAttention\): it was never called"),
        (FusedOtherwise(*net(CAUSAL).layers), CAUSAL, {}, "gives other outputs"),
        (Net(POOLED(D, D)), CAUSAL, {}, "makes no single call"),
        (nn.Sequential(OrderedDict(attn=RunningSum(D, D))), CAUSAL, {}, None),
        (nn.Sequential(OrderedDict(attn=RunningSum(D, D))), NEAR, {}, "1 attention layer checked"),
        (nn.Sequential(RunningSum(D, D)), CAUSAL, {}, "no attention layer ran"),
        (BROKEN, CAUSAL, {}, "are not finite"),
        (nn.Linear(D, D), CAUSAL, {}, "no attention layer ran"),
        (None, CAUSAL, {}, r"torch\.nn\.Module"),
    ],
)
def test_only_equal_layers_pass(model: Any, spec: Any, settings: Any, words: str | None) -> None:
    failing = (AssertionError, attnspec.AttnSpecError, TypeError)
    x = () if "call" in settings else (states(),)
    with pytest.raises(failing, match=words) if words else contextlib.nullcontext():
        assert_attends(model, spec, *x, **settings)


def test_an_early_end_reports_the_layers_checked() -> None:
    def stop(count: int, path: str) -> None:
        if count == 1:
            raise KeyboardInterrupt

    run = Run(net(CAUSAL), CAUSAL, (states(),), {}, progress=stop)
    with pytest.raises(KeyboardInterrupt, match="interrupted: Ctrl-C, after 1 layer\n"):
        run.verified()
    assert [run.report.ok, *(layer.ok for layer in run.report.layers)] == [False, True]
    late = Run(net(CAUSAL), CAUSAL, (states(),), {}, seconds=0.0).verified()
    assert (late.ok, late.interrupted) == (False, "the time limit, after 0 layers")


def test_documents_begin_where_positions_start_again() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [3, 4, 5, 6, 8], [0, 0, 0, 1, 2]])
    real = torch.tensor([[1] * 5, [1] * 5, [0, 0, 1, 1, 1]]).bool()
    assert documents(positions, real).tolist() == [[0, 0, 0, 1, 1], [0] * 5, [0] * 5]


def test_the_known_leak_of_packed_documents_is_reported() -> None:
    call: dict[str, Any] = {"input_ids": tokens(2, 12), "position_ids": POSITIONS}
    model = llama("sdpa")
    assert verify_model(model, DOCUMENTS, **call, use_cache=False).ok
    for leaking, way_out in (
        ({}, "equal with use_cache = False"),
        ({"attention_mask": ONES, "use_cache": False}, "equal with attention_mask = None"),
        ({"attention_mask": ONES}, "equal with attention_mask = None and use_cache = False"),
    ):
        report = verify_model(model, DOCUMENTS, **call, **leaking)
        assert report.leaks[0] == (0, 0, 0, 5, 0)
        assert "another document is read" in str(report)
        assert way_out in str(report)


def test_faults_inside_transformers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build("Mistral", "eager"), tokens(2, 16)
    caches = transformers.DynamicCache(config=model.config), transformers.DynamicCache()
    for cache in caches:
        model(ids[:, :9], past_key_values=cache)
    assert verify_model(model, NEAR, ids[:, 9:], past_key_values=caches[0]).ok
    assert caches[0].get_seq_length() == 9
    model.config.sliding_window = None
    report = verify_model(model, NEAR, ids[:, 9:], past_key_values=caches[1])
    assert report.leaks[0] == (0, 0, 0, 9, 0)
    assert "DynamicCache with 9 positions" in str(report)
    modeling: Any = transformers.models.mistral.modeling_mistral
    monkeypatch.setattr(modeling, "repeat_kv", lambda x, count: x.repeat(1, count, 1, 1))
    report = verify_model(model, CAUSAL, ids)
    assert "query head 1 reads the values of head 1" in str(report)


@pytest.mark.parametrize("left", [True, False])
def test_padding_on_either_side(left: bool) -> None:
    call: dict[str, Any] = {"input_ids": tokens(3, 12), "attention_mask": padded(12, left=left)}
    assert verify_model(llama("eager"), CAUSAL, **call).ok
    model = bert("sdpa")
    assert verify_model(model, FULL, **call).ok
    # a mask of ones: padding is read, and the spec is told which that is
    read = {**call, "attention_mask": torch.ones_like(call["attention_mask"])}
    model.forward = lambda *args, _call=model.forward, **kwargs: _call(**read)
    assert "padding is read" in str(verify_model(model, FULL, **call))


@pytest.mark.filterwarnings("ignore:`sinks` names positions")
def test_positions_count_from_the_first_real_token() -> None:
    sinks = attnspec.parse("attention sinks { causal attend columns(first(2)) | self }")
    call: dict[str, Any] = {"input_ids": tokens(3, 12), "attention_mask": padded(12, left=True)}
    with names_restored(), convert(llama("eager"), sinks) as done:
        assert verify_model(done.model, sinks, **call).ok
        assert verify_model(done.model, sinks, **call, positions="real").missing


def test_cross_attention_needs_a_spec_that_says_so() -> None:
    family = BY_STEM["Bart"]
    model, call = family.build(), family.inputs()
    report = verify_model(model, CROSS, call=call)
    assert report.ok
    assert [layer.layer for layer in report.layers if layer.reason is None] == [0, 1]
    report = verify_model(model, CAUSAL, call=call, layers=[2, 3])
    assert report.ok
    assert "it reads another sequence, and the spec has one" in str(report)


def test_converted_models_find_packed_documents() -> None:
    call: dict[str, Any] = {"input_ids": tokens(2, 12)}
    every: list[dict[str, Any]] = [{}, {"attention_mask": ONES}, {"use_cache": False}]
    with names_restored():
        model, other = llama("eager"), llama("eager")
        registered = llama(register(DOCUMENTS, "attnspec_packed_by_positions", override=True))
        convert(model, DOCUMENTS)
        convert(other, CAUSAL)
        for built in (model, registered):
            for at, settings in enumerate(every):
                call["position_ids"] = torch.cat([torch.arange(5 + at), torch.arange(7 - at)])[None]
                with TestCase().assertLogs("attnspec") as said:
                    assert_attends(built, DOCUMENTS, **call, **settings)
                assert "2 packed documents a sample; they are the input" in said.output[0]
        with pytest.warns(UserWarning, match="2 packed documents a sample.* read each other"):
            assert not verify_model(other, DOCUMENTS, **call, attention_mask=ONES).ok
        # said once
        assert verify_model(other, CAUSAL, **call).ok
        kinds = {layer.kind for layer in verify_model(registered, DOCUMENTS, **call).layers}
        assert kinds == {"the registered spec attnspec_packed_by_positions"}


@pytest.mark.parametrize("model", few(["Llama", "GptOss", "Bert"], 3))
def test_the_table_of_the_page_is_what_happens(model: str) -> None:
    assert {name for name, _ in shown()} == set(MODELS)
    rows = {attention: cells for (name, attention), cells in shown().items() if name == model}
    with names_restored(), uncompiled():
        for at, (attention, cells) in enumerate(rows.items()):
            for setting in SETTINGS[at::3]:
                assert outcome(model, attention, setting) == cells[setting], (attention, setting)


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "past.attn").write_text(CAUSAL.source)
    (tmp_path / "docs.attn").write_text(DOCUMENTS.source)
    (tmp_path / "made_here.py").write_text(
        "import os, sys, torch\nfrom tiny_models import llama, tokens\n"
        "def alone(): return llama('sdpa')\n"
        "def called(): return alone(), (tokens(1, 8),), {'use_cache': False}\n"
        "def nothing(): return torch.nn.Linear(2, 2)\n"
        "def elsewhere(): os.chdir('..'); sys.path.pop(0); return alone()\n"
    )
    for line, code, words in (
        ("alone past.attn -n 9", 0, ""),
        ("called past.attn", 0, "3 attention layers checked"),
        ("called docs.attn -n 8 --input document=0*3,1*5 --json", 1, "[ [ 0, 0, 0, 3, 0 ]"),
        ("nothing past.attn", 2, "no `vocab_size`"),
        ("missing past.attn", 2, "makes no model"),
        ("elsewhere past.attn -n 9", 0, ""),
        ("x: past.attn", 2, ""),
        ("alone docs.attn", 2, ""),
    ):
        with contextlib.chdir(tmp_path):
            ran = CliRunner().invoke(main, f"verify --model made_here:{line}".split())
        shown = " ".join(ran.output.split())
        assert (ran.exit_code, words in shown) == (code, True), shown
        if "--json" in line:
            layer = json.loads(ran.stdout)["layers"][0]
            assert (layer["ok"], layer["pairs"], layer["leak_count"]) == (False, 4 * 21, 4 * 15)
