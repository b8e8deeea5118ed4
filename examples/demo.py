"""Holds a compiled spec against its definition: `python -m attnspec.examples.demo SPEC MODULE`.

MODULE is the file that `attnspec compile SPEC` wrote. Its outputs and gradients are compared, in
float64, at odd lengths or the spec's own, with the compiler's dense backend and with a softmax
written here over `spec.mask(n)`. Run-time inputs are made up. A spec that changes the scores or
normalises them in another way is compared with the dense backend alone.

Without MODULE it prints the options with which `attnspec show SPEC` draws the spec: a length, and
inputs such as are made up here.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

import attnspec
from attnspec.compile.emit import class_name

LENGTHS = (1, 129, 515)
"""Where the spec has no length of its own."""

DRAWN = 64
"""How many positions are drawn, where the spec has no length of its own."""

BATCH = 2
TOLERANCE = 1e-12
"""Largest difference allowed, for values of order one: some thousand roundings of float64."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]

Inputs = dict[str, torch.Tensor]


def load_emitted(path: Path, name: str) -> torch.nn.Module:
    """The module of an emitted file: the class is the attention's name in CamelCase."""
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"{path} must be a Python file")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    emitted = getattr(module, class_name(name))()
    if not isinstance(emitted, torch.nn.Module):
        raise TypeError(f"{path} must define a torch.nn.Module named after {name}")
    return emitted


def heads_of(spec: attnspec.Spec) -> int:
    """The heads to try: as many as the spec declares, or two."""
    return spec.heads or 2


def lengths_of(spec: attnspec.Spec) -> tuple[int, ...]:
    """The lengths to try: the size of a fixed grid, or several."""
    fixed = spec.program.fixed_length
    return LENGTHS if fixed is None else (fixed,)


def is_plain(spec: attnspec.Spec) -> bool:
    """Whether all weights are the softmax of q k / sqrt(d)."""
    return all(
        a.normalize == "softmax" and not a.scores and a.scale is None for a in spec.program.attends
    )


def made_up(spec: attnspec.Spec, n: int) -> list[Mapping[str, np.ndarray]]:
    """Run-time inputs of a batch, sample by sample: another cut, other tokens in each."""
    samples: list[Mapping[str, np.ndarray]] = []
    for sample in range(BATCH):
        at = np.arange(n)
        values: dict[str, np.ndarray] = {}
        for place, (name, entry) in enumerate(spec.inputs.items()):
            if entry.kind == "tokens":
                marked = at % 11 == (sample + place) % max(1, min(11, n))
                if entry.at_most is not None:
                    marked &= marked.cumsum() <= entry.at_most
                values[name] = marked
            elif entry.kind == "ids":
                values[name] = at // max(1, n // (sample + place + 2))
            elif entry.kind == "numbers":
                values[name] = at * 60.0 * (sample + place + 1)
            else:
                values[name] = np.array(n // (sample + place + 2))
        samples.append(values)
    return samples


def batched(samples: Sequence[Mapping[str, np.ndarray]]) -> Inputs:
    """The inputs of all samples as the tensors that a module takes."""
    return {
        name: torch.from_numpy(np.stack([sample[name] for sample in samples]))
        for name in samples[0]
    }


def show_options(spec: attnspec.Spec, drawn: int = DRAWN) -> str:
    """The options of `attnspec show` for the first sample of what is made up here, at `drawn`
    positions where the spec has no length of its own.

    Inputs for each head, which no command line holds, are left out: a sample of them is drawn.
    """
    n = spec.program.fixed_length or drawn
    options = [f"-n {n}"]
    for name, values in made_up(spec, n)[0].items():
        match spec.inputs[name].kind:
            case "tokens":
                text = ",".join(str(position) for position in np.flatnonzero(values))
            case "ids":
                ids, counts = np.unique(values, return_counts=True)
                text = ",".join(f"{i}*{count}" for i, count in zip(ids, counts, strict=True))
            case "numbers":
                text = ",".join(f"{value:g}" for value in values)
            case "length":
                text = str(values)
            case _:
                continue
        options.append(f"--input {name}={text}")
    return " ".join(options)


def masked_softmax(spec: attnspec.Spec, samples: Sequence[Mapping[str, np.ndarray]]) -> Attention:
    """Attention by its textbook formula: every score, and -inf where the mask is false."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        n = q.shape[-2]
        masks = [
            np.stack([spec.mask(n, layer, head, sample) for head in heads]) for sample in samples
        ]
        mask = torch.from_numpy(np.stack(masks))
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        # a query without keys reads nothing
        out: torch.Tensor = weights.masked_fill(~mask, 0.0) @ v
        return out

    heads = range(heads_of(spec))
    return attend


def through(module: torch.nn.Module, inputs: Inputs) -> Attention:
    return lambda q, k, v, layer: module(q, k, v, layer=layer, inputs=inputs)


def run(attention: Attention, n: int, heads: int, layer: int) -> list[torch.Tensor]:
    """The output and the gradients of q, k and v, for inputs that depend on n alone."""
    generator = torch.Generator().manual_seed(n)

    def draw() -> torch.Tensor:
        return torch.randn(BATCH, heads, n, 16, dtype=torch.float64, generator=generator)

    q, k, v = (draw().requires_grad_() for _ in range(3))
    weight = draw()
    out = attention(q, k, v, layer)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), (q, k, v))]


def largest_difference(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """The largest absolute difference; NaN where either side has one."""
    return max(
        (float((x - y).abs().max()) for x, y in zip(a, b, strict=True)),
        key=lambda difference: (math.isnan(difference), difference),
    )


def verify(spec: attnspec.Spec, emitted: torch.nn.Module) -> bool:
    """Prints the largest differences of each layer and length; whether all are small enough."""
    dense = spec.compile(backend="dense")
    good = True
    for n in lengths_of(spec):
        samples = made_up(spec, n)
        inputs = batched(samples)
        references = {"dense backend": through(dense, inputs)}
        if is_plain(spec):
            references["masked softmax"] = masked_softmax(spec, samples)
        for layer in range(spec.layers):
            got = run(through(emitted, inputs), n, heads_of(spec), layer)
            for name, reference in references.items():
                wanted = run(reference, n, heads_of(spec), layer)
                values = largest_difference(got[:1], wanted[:1])
                gradients = largest_difference(got[1:], wanted[1:])
                good = good and values <= TOLERANCE and gradients <= TOLERANCE
                print(
                    f"layer {layer}  n = {n:<4}  against {name:<14}  "
                    f"values {values:.1e}  gradients {gradients:.1e}"
                )
    return good


def main(arguments: Sequence[str]) -> int:
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    spec = attnspec.load(arguments[0])
    if len(arguments) == 1:
        print(show_options(spec))
        return 0
    if not verify(spec, load_emitted(Path(arguments[1]), spec.name)):
        print(f"not verified: {arguments[1]} differs from its definition", file=sys.stderr)
        return 1
    print(f"verified: {arguments[1]} computes what {arguments[0]} says, values and gradients")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
