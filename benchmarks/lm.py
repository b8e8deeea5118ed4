"""A language model of bytes, trained twice: full causal attention beside a sparse spec.

`make lm` trains two models of one size from the same numbers, for the same seconds each, on the
source of Python's own library: one reads every byte before, the other what `lm.attn` says. It tells
bits per byte of files that were held out, against seconds and bytes read, then has both write on
from a text as long as they were trained with, each with a cache. Figures go to `results/lm.json`,
curves to `results/lm.svg`; the exit status is 1 where what the caches give is not what one pass
over the whole text gives.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from zlib import crc32

import torch
from torch.nn import functional

import attnspec
from attnspec.bench.timing import machine, versions
from attnspec.integrations.transformers import SpecCache, convert
from attnspec.spec import Spec
from benchmarks.measuring import Json, write
from benchmarks.plots import draw
from benchmarks.readme_tables import RESULTS, lm_table

SPEC = Path(__file__).resolve().parent / "lm.attn"

CAUSAL = "attention full { causal attend full }"
"""What the other model reads; torch's own attention computes it."""

BETWEEN = 256
"""The symbol between two files, after the 256 bytes."""

HELD_OUT = 20
"""Files whose names' checksum is a multiple of it are held out."""

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
"""Folders that are no part of the library, or test it."""

RISE, FLOOR = 0.05, 0.1
"""The share of the time in which the rate rises, and the share of it that is left at the end."""

TOLERANCE = 1e-3
"""Largest difference of a logit between a cache and one pass over the whole text."""


@dataclass(frozen=True)
class Settings:
    """Sizes in symbols and numbers, `seconds` of training for each model."""

    seconds: float
    context: int = 4096
    layers: int = 4
    heads: int = 4
    hidden: int = 128
    inner: int = 352
    rate: float = 3e-3
    seed: int = 0
    evaluations: int = 8
    windows: int = 8
    written: int = 256

    def spec(self) -> Spec:
        """The sparse attention, its window and strides a fixed share of the context."""
        recent, stride, far = self.context // 16, self.context // 128, self.context // 2
        return attnspec.load(SPEC, recent=recent, stride=max(stride, 2), far=far)


DRY = Settings(0.5, context=64, layers=2, hidden=16, inner=32, evaluations=2, windows=2, written=8)


# --- the text -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Two texts of symbols below 257, int16 [length], and the files and bytes that they are."""

    train: torch.Tensor
    held_out: torch.Tensor
    files: int
    bytes: int


def library(folder: Path, most: int | None = None) -> Text:
    """The modules of Python's library in a folder, sorted by name, or the first `most` of them: a
    file is held out by its name alone. Raises ValueError where one of both texts is empty."""
    found = [path.relative_to(folder) for path in folder.rglob("*.py")]
    names = sorted(name.as_posix() for name in found if not SKIPPED.intersection(name.parts))[:most]
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for name in names:
        parts[crc32(name.encode()) % HELD_OUT == 0].append((folder / name).read_bytes())
    if not all(parts.values()):
        raise ValueError(f"modules to train with and to hold out are needed, got {len(names)}")
    everything = [text for each in parts.values() for text in each]
    size = sum(len(text) for text in everything)
    return Text(_symbols(parts[False]), _symbols(parts[True]), len(everything), size)


def _symbols(texts: Sequence[bytes]) -> torch.Tensor:
    """Texts one after the other, each with `BETWEEN` behind it, int16 [length]."""
    between = torch.tensor([BETWEEN], dtype=torch.int16)
    parts = []
    for text in texts:
        # frombuffer takes no empty buffer
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else between[:0]
        parts += [own.to(torch.int16), between]
    return torch.cat(parts)


def drawn(text: torch.Tensor, settings: Settings) -> Iterator[torch.Tensor]:
    """Windows [context + 1] from anywhere in a text, the same ones for every model, without end."""
    generator = torch.Generator().manual_seed(settings.seed)
    last = len(text) - settings.context
    while True:
        start = int(torch.randint(last, (1,), generator=generator))
        yield text[start : start + settings.context + 1].long()


def spread(text: torch.Tensor, settings: Settings) -> list[torch.Tensor]:
    """The windows [context + 1] that models are compared on, at equal distances in a text."""
    last = len(text) - settings.context - 1
    starts = [last * i // max(settings.windows - 1, 1) for i in range(settings.windows)]
    return [text[start : start + settings.context + 1].long() for start in starts]


# --- training -------------------------------------------------------------------------------------


def model_of(settings: Settings) -> Any:
    """A Llama with rotary positions and torch's own causal attention, the same numbers each
    time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=BETWEEN + 1,
        hidden_size=settings.hidden,
        intermediate_size=settings.inner,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=settings.context + settings.written,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def loss_of(model: Any, window: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the symbols of a window behind the first, in bits."""
    logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
    return functional.cross_entropy(logits, window[1:]) / math.log(2)


@torch.no_grad()
def bits(model: Any, windows: Sequence[torch.Tensor]) -> float:
    """Bits per byte over some windows; the symbol between two files counts as a byte."""
    return sum(float(loss_of(model, window)) for window in windows) / len(windows)


def share_of_rate(spent: float) -> float:
    """The rate at a share of the time, of the highest: it rises, then falls in a straight line."""
    left = 1 - (1 - FLOOR) * (spent - RISE) / (1 - RISE)
    return max(min(spent / RISE, left), FLOOR)


def train(model: Any, text: Text, settings: Settings) -> list[dict[str, Json]]:
    """Train for the seconds of the settings and return the curve: after equal seconds of training
    what was read and the bits per byte. Looking at held-out windows costs no time of it, choosing
    and building kernels in the first step does."""
    tuned = torch.optim.AdamW(
        model.parameters(), settings.rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    windows, batches = spread(text.held_out, settings), drawn(text.train, settings)
    curve: list[dict[str, Json]] = [{"seconds": 0.0, "read": 0, "bits": bits(model, windows)}]
    seconds, read, looked = 0.0, 0, 0
    while seconds < settings.seconds:
        start = perf_counter()
        for group in tuned.param_groups:
            group["lr"] = settings.rate * share_of_rate(seconds / settings.seconds)
        tuned.zero_grad()
        torch.autograd.backward(loss_of(model, next(batches)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        tuned.step()
        seconds, read = seconds + perf_counter() - start, read + settings.context
        due = int(seconds / settings.seconds * settings.evaluations)
        if due > looked:
            looked = due
            curve.append({"seconds": seconds, "read": read, "bits": bits(model, windows)})
            print(f"  {seconds:.0f} s, {read:,} bytes: {curve[-1]['bits']:.3f} bits", flush=True)
    return curve


# --- generation -----------------------------------------------------------------------------------


class Clock:
    """A streamer of `generate` that notes when each symbol came; the first is the text itself."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        """Nothing is left to note."""


def cache_bytes(cache: Any) -> int:
    """The memory of a cache of transformers or of a spec."""
    if isinstance(cache, SpecCache):
        return cache.bytes
    tensors = (x for each in cache.layers for x in (each.keys, each.values))
    return sum(x.untyped_storage().nbytes() for x in tensors)


@torch.no_grad()
def written(model: Any, cache: Any, prompt: torch.Tensor, settings: Settings) -> dict[str, Json]:
    """What `generate` writes behind a text [length] with a cache, the likeliest symbol each time:
    how fast, what the cache holds at the end, and how it compares with one pass over all of it.

    Where row q reads the same at every n, that pass has in row q what a model without a cache would
    choose from: the tokens agree in all places or differ first where generation itself would.
    """
    clock, length = Clock(), len(prompt)
    found = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        past_key_values=cache,
        max_new_tokens=settings.written,
        do_sample=False,
        streamer=clock,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens, logits = found.sequences[0, length:], torch.cat(found.logits)
    whole = model(input_ids=found.sequences[:, :-1], use_cache=False).logits[0, length - 1 :]
    print(bytes(int(x) % BETWEEN for x in tokens).decode("utf-8", "replace"), flush=True)
    return {
        "prompt": length,
        "written": len(tokens),
        "prompt_seconds": clock.times[1] - clock.times[0],
        "bytes_per_second": (len(tokens) - 1) / (clock.times[-1] - clock.times[1]),
        "cache_bytes": cache_bytes(cache),
        "equal_tokens": int((whole.argmax(-1) == tokens).sum()),
        "largest_difference": float((whole - logits).abs().max()),
    }


# --- both models ----------------------------------------------------------------------------------


def measure(text: Text, settings: Settings) -> dict[str, Json]:
    """All figures, as plain data."""
    from transformers import DynamicCache

    spec, models = settings.spec(), dict[str, Json]()
    prompt = text.held_out[: settings.context].long()
    parameters = 0
    for name, sparse in (("full causal", False), (spec.name, True)):
        print(name, flush=True)
        model = model_of(settings)
        parameters = sum(x.numel() for x in model.parameters())
        if sparse:
            convert(model, spec)
        curve = train(model.train(), text, settings)
        model.eval()
        cache = SpecCache(model) if sparse else DynamicCache()
        models[name] = {
            "keys": _keys(spec if sparse else attnspec.parse(CAUSAL), settings),
            "curve": [*curve],
            "cache": type(cache).__name__,
            "generation": written(model, cache, prompt, settings),
        }
    told = asdict(settings) | {"parameters": parameters}
    return {
        "machine": machine(),
        "versions": versions(("torch", "transformers")) | {"python": platform.python_version()},
        "text": {
            "files": text.files,
            "bytes": text.bytes,
            "train": len(text.train),
            "held_out": len(text.held_out),
        },
        "settings": told,
        "spec": spec.source,
        "tolerance": TOLERANCE,
        "models": models,
    }


def _keys(spec: Spec, settings: Settings) -> float:
    """The keys of a query, the mean over rows and heads of the context."""
    density = spec.analyse(settings.context).density
    if density is None:
        raise ValueError(f"a graph that is counted without data is needed, got `{spec.name}`")
    return density * settings.context


def differing(figures: dict[str, Any]) -> list[str]:
    """A line for each model whose cache gives something else than one pass does."""
    return [
        f"{name}: a cache must give what one pass gives up to {TOLERANCE:g}, got"
        f" {found['generation']['largest_difference']:.2g}"
        for name, found in figures["models"].items()
        if not found["generation"]["largest_difference"] <= TOLERANCE
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lm", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=4.0, help="of training, for each model")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="1 on a machine that is busy"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny models, some seconds")
    parser.add_argument("--results", type=Path, default=RESULTS / "lm.json", help="the figures")
    options = parser.parse_args(arguments)
    if options.dry_run and options.results == RESULTS / "lm.json":
        print("--dry-run measures nothing: name another file by --results", file=sys.stderr)
        return 2
    if not (0 < options.minutes < math.inf and options.threads > 0):
        print(
            "minutes and threads above 0 are needed, got"
            f" {options.minutes:g} and {options.threads}",
            file=sys.stderr,
        )
        return 2
    folder = Path(sysconfig.get_paths()["stdlib"])
    if options.dry_run:
        text, settings = library(folder, 60), DRY
    else:
        torch.set_num_threads(options.threads)
        text, settings = library(folder), Settings(60 * options.minutes)
    figures = measure(text, settings)
    write(options.results, figures)
    draw(figures, options.results.parent)
    print(lm_table(figures))
    wrong = differing(figures)
    print(*wrong, sep="\n", end="\n" * bool(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
