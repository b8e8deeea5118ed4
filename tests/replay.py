"""`make replay BASE=COMMIT`: what two checkouts say and compute of the same specs, side by side.

The specs are those of the zoo with small parameters and random ones, drawn once, by the newer
checkout. A process of each checkout writes down masks, chosen kernels, values and gradients in
float64, the figures of reports and the verdicts on claims, at five lengths, by public calls alone,
so that any commit can be the base. Numbers are compared with a tolerance, everything else exactly.
Nothing is kept. The exit status is 1 where something differs that no option explains.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent

LENGTHS = (1, 7, 40, 130, 520)

SECONDS = 90
"""Of processor time, what one part of one spec at one length may take."""

PARTS = ("mask", "plan", "values", "report", "verdicts")

TOLERANCE = 1e-9


def tasks_of(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """The attentions that ship, with small parameters, and random specs of the language."""
    from oracle.tree import text
    from population import small
    from specs import drawn
    from zoo import ATTENTIONS

    import attnspec

    for path, name in ATTENTIONS:
        spec = small(path, name)
        yield {"id": f"{path.stem}:{name}", "text": spec.source, "lengths": lengths_of(spec)}
    for number, written in enumerate(map(text, drawn(count, seed))):
        try:
            lengths = lengths_of(attnspec.parse(written))
        except attnspec.SpecError:
            # a refusal is an answer, too
            lengths = list(LENGTHS)
        yield {"id": f"random {number}", "text": written, "lengths": lengths}


def lengths_of(spec: Any) -> list[int]:
    """The lengths at which a spec is asked, those of its grid where it has one."""
    program = spec.program
    if program.fixed_length:
        return [program.fixed_length]
    if program.grid is None:
        return list(LENGTHS)
    cells = int(np.prod([side for side in program.grid if isinstance(side, int)]))
    return [cells * rows + program.extra_tokens for rows in (1, 2, 5)]


def answers_of(task: Mapping[str, Any], parts: tuple[str, ...]) -> dict[str, Any]:
    """What one checkout says of one spec, refusals included."""
    # which imports the package that is asked
    from population import inputs_of

    import attnspec

    answers: dict[str, Any] = {}

    def record(key: str, ask: Callable[[], Any]) -> Any:
        if key.partition(" ")[0] not in (*parts, "spec", "compile"):
            return None
        answer = None
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            answer = ask()
        except Exception as error:
            answers[f"{key}{at}"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        else:
            answers.update(flattened(f"{key}{at}", answer))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return answer

    at = ""
    spec = record("spec", lambda: attnspec.parse(task["text"]))
    if spec is None:
        return answers
    answers["spec"] = spec.source
    record("verdicts", lambda: [verdict_text(each) for each in spec.verdicts])
    module = record("compile", lambda: module_of(spec))
    answers["compile"] = module is not None or answers["compile"]
    for n in task["lengths"]:
        at, inputs = f" n={n}", inputs_of(spec, n)
        for layer, head in np.ndindex(min(spec.layers, 2), min(spec.heads or 1, 3)):
            ask = partial(spec.mask, n, layer=layer, head=head, inputs=inputs or None)
            record(f"mask layer {layer} head {head}", ask)
        record("plan", partial(chosen_kernels, spec, n))
        record("report", lambda n=n, x=inputs: spec.analyse(n, inputs=x or None).to_dict())  # type: ignore[misc]
        if module is not None:
            record("values", partial(values, spec, module, n, inputs))
    return answers


def module_of(spec: Any) -> Any:
    """The compiled module in float64, its learned parts set by their names."""
    import torch

    module = spec.compile().double()
    for name, parameter in sorted(module.named_parameters()):
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).double() * 0.3)
    return module


def values(spec: Any, module: Any, n: int, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Output and gradients of each layer (two at most) for two samples, the second one padded."""
    import torch

    generator = torch.Generator().manual_seed(n)
    heads = spec.heads or 2
    made: dict[str, Any] = {}
    for layer in range(min(spec.layers, 2)):
        q, k, v, weight = torch.randn(4, 2, heads, n, 8, generator=generator).double()
        leaves = [x.clone().requires_grad_() for x in (q, q if reads_queries(spec) else k, v)]
        mask = torch.ones(2, n, dtype=torch.bool)
        mask[1, : n // 5] = False
        tensors = {name: torch.as_tensor(np.stack([x, x])) for name, x in inputs.items()}
        arguments: dict[str, Any] = {"layer": layer, "key_padding_mask": mask}
        if tensors:
            arguments["inputs"] = tensors
        out = module(*leaves, **arguments)
        (out * weight).sum().backward()
        made[f"out {layer}"] = out.detach().numpy()
        for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True):
            made[f"{name} {layer}"] = np.zeros(0) if leaf.grad is None else leaf.grad.numpy()
        if n <= 130:
            try:
                pairs = module.pairs(q, leaves[1].detach(), **arguments)
            except ValueError as error:
                made[f"pairs {layer}"] = str(error).splitlines()[0][:160]
            else:
                made[f"pairs {layer}"] = pairs.numpy()
    return made


def reads_queries(spec: Any) -> bool:
    """Whether keys must be the queries."""
    return "lsh(" in spec.source and "share_qk = false" not in spec.source


def chosen_kernels(spec: Any, n: int) -> list[str]:
    """The lines of the plan that say what was chosen, without costs."""
    lines = str(spec.plan(n)).splitlines()
    return [re.sub(r"\d[\d.,]* ?(s|ms|us|µs)\b", "", x).strip() for x in lines if "chosen" in x]


def verdict_text(verdict: Any) -> str:
    return f"{verdict.claim.text}: {verdict.status} {list(verdict.lengths)} {verdict.failed_at}"


def flattened(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries, each with its path."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from flattened(f"{key} {name}", inner)
    else:
        yield key, value


def dump(tasks: list[dict[str, Any]], folder: Path, parts: tuple[str, ...]) -> None:
    """Writes a file of answers for each task."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, late)
    for task in tasks:
        answers = pickle.dumps(answers_of(task, parts))
        (folder / f"{task['number']}.pickle").write_bytes(answers)


def late(number: int, frame: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], renamed: list[str], dropped: list[str]
) -> Iterator[tuple[str, str]]:
    """(what, how) of the answers that are not the same."""
    for key in [*old, *(key for key in new if key not in old)]:
        if any(word in key.split() for word in dropped):
            continue
        if key not in new or key not in old:
            side, answers = ("base", old) if key in old else ("newer checkout", new)
            yield key, f"only in the {side}: {as_text(answers[key], [])[:80]}"
            continue
        a, b = old[key], new[key]
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            if a.shape != b.shape:
                yield key, f"shapes {a.shape} and {b.shape}"
            elif a.dtype == bool and (count := int((a != b).sum())):
                yield key, f"{count:,} of {a.size:,} pairs differ, first {np.argwhere(a != b)[0]}"
            elif a.dtype != bool and not np.allclose(a, b, TOLERANCE, TOLERANCE, equal_nan=True):
                yield key, f"values differ by up to {np.nanmax(np.abs(a - b)):.1e}"
        elif isinstance(a, float) and isinstance(b, float):
            if not math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                yield key, f"{a}  ->  {b}"
        elif as_text(a, renamed) != as_text(b, []):
            yield key, f"{as_text(a, renamed)[:300]}  ->  {as_text(b, [])[:300]}"


def as_text(value: Any, renamed: list[str]) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)
    for pair in renamed:
        before, after = pair.split("=", 1)
        text = re.sub(rf"\b{re.escape(before)}\b", after, text)
    return text


def launch(tree: Path, tasks: list[dict[str, Any]], folder: Path, parts: list[str]) -> Any:
    """Starts a process that answers some tasks with the package of a tree."""
    folder.mkdir(exist_ok=True)
    file = folder / f"tasks-{tasks[0]['number']}.json"
    file.write_text(json.dumps(tasks))
    command = [sys.executable, "-W", "ignore", __file__, "--dump", str(file), str(folder)]
    variables = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--only", *parts], cwd=folder, env={**os.environ, **variables}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="HEAD", help="the commit to compare with")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--random", type=int, default=300, help="how many random specs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--match", default="", help="specs whose names have these letters")
    parser.add_argument("--renamed", nargs="*", default=[], metavar="OLD=NEW")
    parser.add_argument("--dropped", nargs="*", default=[], metavar="FIGURE")
    parser.add_argument("--dump", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dump:
        dump(json.loads(options.dump[0].read_text()), options.dump[1], tuple(options.only))
        return 0
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    every = tasks_of(options.random, options.seed)
    tasks = [task for task in every if options.match in task["id"]]
    for number, task in enumerate(tasks):
        task["number"] = number
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = folder / "base"
        base.mkdir()
        archive = subprocess.run(
            ["git", "archive", options.base], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x"], cwd=base, input=archive.stdout, check=True)
        sides = {"old": base, "new": ROOT}
        running = [launch(tree, tasks, folder / side, options.only) for side, tree in sides.items()]
        if any([process.wait() for process in running]):
            print("a process ended early", file=sys.stderr)
            return 2
        return compared(tasks, folder, options)


def compared(tasks: list[dict[str, Any]], folder: Path, options: argparse.Namespace) -> int:
    """Prints what differs, spec by spec, and a summary."""
    kinds: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    answers = 0
    for task in tasks:
        old, new = (
            pickle.loads((folder / side / f"{task['number']}.pickle").read_bytes())
            for side in ("old", "new")
        )
        answers += len(new)
        refusals.update(
            re.sub(r" n=\d+|\d+", "", key).strip()
            for key, value in new.items()
            if isinstance(value, str) and re.match(r"\w+(Error|Exception): ", value)
        )
        faults = list(differences(old, new, options.renamed, options.dropped))
        if faults:
            print(task["id"])
        for key, how in faults:
            print(f"   {key}: {how}")
            kinds[re.sub(r" n=\d+|\d+", "", key).strip()] += 1
    print(f"{len(tasks)} specs, {answers:,} answers, {sum(kinds.values()):,} differ")
    for kind, count in kinds.most_common():
        print(f"  {count:5,}  {kind}")
    print("refused by the newer checkout:", dict(refusals.most_common()))
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
