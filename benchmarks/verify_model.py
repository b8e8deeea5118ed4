"""What `verify_model` takes of a model of 12 layers, over one forward and backward pass of it.

`python -m benchmarks.verify_model` prints a line for each attention implementation.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnspec

N, HEADS, SIZE, ROUNDS = 512, 12, 64, 3


def seconds(call: Callable[[], object]) -> float:
    """The shortest of a few runs."""
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def line(implementation: str) -> str:
    """What one implementation takes."""
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=HEADS * SIZE,
        intermediate_size=4 * HEADS * SIZE,
        num_hidden_layers=12,
        num_attention_heads=HEADS,
    )
    config._attn_implementation = implementation
    model, ids = LlamaForCausalLM(config), torch.arange(N)[None]
    spec = attnspec.parse("attention past { causal attend full }")
    step = seconds(lambda: model(ids, labels=ids).loss.backward())
    verified = seconds(lambda: attnspec.verify_model(model, spec, ids))
    found = attnspec.verify_model(model, spec, ids)
    passes = sum(layer.passes for layer in found.layers)
    return (
        f"{implementation}: {verified:.2f} s, {verified / step:.2f} times a forward and a backward"
        f" pass of {step:.2f} s; {passes} calls in {len(found.layers)} layers, ok = {found.ok}"
    )


if __name__ == "__main__":
    for name in ("sdpa", "eager"):
        print(line(name))
