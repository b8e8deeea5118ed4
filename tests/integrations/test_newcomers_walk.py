"""A newcomer's walk: one converted model, trained, saved, loaded by another process, compiled,
exported and generating, with equal outputs at each point."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import attnspec
from attnspec.integrations.transformers import convert

transformers = pytest.importorskip("transformers")

TEXT = "attention sinks { causal attend window(before = 5, after = 0) | columns(first(2)) }"

LOADED = """
import sys, torch, transformers, attnspec
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
ids = torch.load(sys.argv[1] + "/ids.pt")
with torch.no_grad():
    torch.save(model(ids).logits, sys.argv[1] + "/logits.pt")
"""


def logits(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **more).logits  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=61,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    convert(model, attnspec.parse(TEXT), positions="real")
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(3, 61, (2, 24))
    first = model(input_ids=ids, labels=ids).loss
    first.backward()
    optimiser.step()
    assert model(input_ids=ids, labels=ids).loss < first
    return model.eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(1))


def test_saved_and_loaded_by_another_process(model: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    torch.save(ids, tmp_path / "ids.pt")
    subprocess.run([sys.executable, "-W", "ignore", "-c", LOADED, str(tmp_path)], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), logits(model, ids))


@pytest.mark.skipif(
    torch.__version__ < "2.11",
    reason="torch.compile takes a converted model from torch 2.11 on",
)
def test_compiled_in_one_graph(model: Any, ids: torch.Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for mask in (None, torch.ones_like(ids)):
        wanted = logits(model, ids, attention_mask=mask, use_cache=False)
        torch.testing.assert_close(
            logits(compiled, ids, attention_mask=mask, use_cache=False), wanted
        )


def test_exported_with_a_dynamic_length(model: Any, ids: torch.Tensor) -> None:
    traced = torch.export.export(
        model,
        (),
        {"input_ids": ids, "use_cache": False},
        dynamic_shapes={"input_ids": {1: torch.export.Dim("n", min=4, max=64)}, "use_cache": None},
    ).module()
    for n in (20, 9):
        out = traced(input_ids=ids[:, :n], use_cache=False).logits
        torch.testing.assert_close(out, logits(model, ids[:, :n]))


@pytest.mark.parametrize(
    ("left", "cache"), [(True, "dynamic"), (True, "static"), (False, "dynamic")]
)
def test_padding_changes_nothing_that_is_generated(
    model: Any, ids: torch.Tensor, cache: str, left: bool
) -> None:
    batch, mask = ids.clone(), torch.ones_like(ids)
    batch[1] = 0
    place = slice(7, None) if left else slice(0, 13)
    batch[1, place] = ids[1, :13]
    mask[1] = 0
    mask[1, place] = 1
    torch.testing.assert_close(
        logits(model, batch, attention_mask=mask)[1, place], logits(model, ids[1:, :13])[0]
    )
    if not left:
        return
    alone = [
        model.generate(row[None], max_new_tokens=6, do_sample=False)[0, len(row) :]
        for row in (ids[0], ids[1, :13])
    ]
    out = model.generate(
        batch, attention_mask=mask, max_new_tokens=6, do_sample=False, cache_implementation=cache
    )
    torch.testing.assert_close(out[:, ids.shape[1] :], torch.stack(alone))
