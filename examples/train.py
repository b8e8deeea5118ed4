"""Trains a small causal model with a spec: `python -m attnspec.examples.train --device cuda`.

A model of bytes, of two blocks, learns the text of the zoo's files; on a GPU in bfloat16. The plan
comes first: which backend runs the spec on that device, and why the others do not. What to expect:
the loss, in bits a byte, starts near 8; with `--n 256 --steps 120`, half a minute on one core of a
CPU, it ends near 3.2. A first step on a GPU takes longer: FlexAttention is compiled, once.

`--help` lists the options. A spec, of the zoo or your own, is a file: `attnspec zoo causal_window
-o mine.attn`, then `--spec mine.attn`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import attnspec

HERE = Path(__file__).resolve().parent

BATCH, WIDTH, HEADS, BLOCKS = 8, 128, 4, 2

RATE, WARM = 3e-3, 10
"""The learning rate, and the steps in which it is reached."""


class Block(nn.Module):
    """Attention as a layer of the spec says, and two dense layers, each beside a residual."""

    def __init__(self, spec: attnspec.Spec, layer: int) -> None:
        super().__init__()
        self.attention = attnspec.SelfAttention(spec, WIDTH, HEADS, layer)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.dense = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, n, WIDTH] -> [B, n, WIDTH]."""
        x = x + self.attention(self.norms[0](x))
        return x + self.dense(self.norms[1](x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """The next byte of every position."""

    def __init__(self, spec: attnspec.Spec, n: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(n, WIDTH)
        layers = spec.program.layers or 1
        self.blocks = nn.Sequential(*(Block(spec, at % layers) for at in range(BLOCKS)))
        self.last = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The logits [B, n, 256] of the byte behind each of `text`, int64 [B, n]."""
        at = torch.arange(text.shape[1], device=text.device)
        x = self.bytes(text) + self.places(at)
        return self.last(self.blocks(x))  # type: ignore[no-any-return]


def corpus(device: str) -> torch.Tensor:
    """The bytes of the zoo's files, one after the other."""
    text = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.attn")))
    return torch.tensor(list(text), device=device)


def train(spec: attnspec.Spec, device: str, n: int, steps: int) -> list[float]:
    """The loss of every step in bits a byte, printed as it goes."""
    torch.manual_seed(0)
    text, model = corpus(device), Model(spec, n).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses: list[float] = []
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM)
        first = torch.randint(len(text) - n, (BATCH, 1), device=device)
        taken = text[first + torch.arange(n + 1, device=device)]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(taken[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), taken[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(loss.item() / math.log(2))
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:4d}  {losses[-1]:.2f} bits a byte", flush=True)
    return losses


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cuda = torch.cuda.is_available()
    default = HERE / "sparse_strided_merged.attn"
    about = f"a causal spec without run-time inputs; {default.name} of the zoo if not given"
    parser.add_argument("--spec", type=Path, metavar="FILE", default=default, help=about)
    parser.add_argument("--device", default="cuda" if cuda else "cpu", help="cuda or cpu")
    parser.add_argument("--n", type=int, metavar="LENGTH", default=512, help="512 bytes")
    parser.add_argument("--steps", type=int, metavar="COUNT", default=30, help="30 if not given")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not cuda:
        parser.error("torch finds no GPU here: leave --device out to train on the CPU")
    try:
        spec = attnspec.load(options.spec)
    except attnspec.SpecError as error:
        parser.error(str(error))
    print(spec.plan(options.n, options.device, BATCH, HEADS, WIDTH // HEADS))
    train(spec, options.device, options.n, options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
