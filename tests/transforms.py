"""What torch does with modules, tried on a spec of each kind: it works, or is refused in words.

`python tests/transforms.py attnspec/runtime/README.md` writes the table anew. What neither works
nor is refused by this package fails.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import attnspec
from attnspec.runtime import CompiledAttention, composed

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "attnspec" / "runtime" / "README.md"
LENGTH, OTHER, HEADS, SIZE = 20, 33, 4, 8


@dataclass(frozen=True)
class Kind:
    """A kind of spec, as the page calls it, and one of the kind."""

    title: str
    body: str

    def __str__(self) -> str:
        return self.title

    def module(self) -> CompiledAttention:
        torch.manual_seed(0)
        module = attnspec.parse(f"attention sample {{ {self.body} }}").compile(head_size=SIZE)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        return module

    def inputs(self, n: int = LENGTH, batch: int = 2) -> dict[str, torch.Tensor]:
        return {"doc": (torch.arange(n) // 7).repeat(batch, 1)} if "doc" in self.body else {}


KINDS = (
    Kind("graph", "heads 4 causal attend window(before = 9, after = 0) score bias(buckets = 8)"),
    Kind("mechanism", "causal attend linear()"),
    Kind("run-time input", "input doc: ids causal attend same(doc)"),
    Kind("decided by q and k", "causal attend topk(keys = 4)"),
)


def tensors(n: int = LENGTH, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(2, HEADS, n, SIZE, generator=generator, dtype=dtype) for _ in range(3)]


def same(found: Any, meant: Any, allowed: float = 1e-4) -> None:
    torch.testing.assert_close(found, meant, rtol=allowed, atol=allowed)


def same_with_gradients(
    run: Callable[..., torch.Tensor], meant: Callable[..., torch.Tensor], n: int = LENGTH
) -> None:
    parts = [x.requires_grad_() for x in tensors(n)]
    outs = run(*parts), meant(*parts)
    same(*outs)
    for one, other in zip(
        *(torch.autograd.grad(out.square().sum(), parts) for out in outs), strict=True
    ):
        same(one, other)


# --- traces --------------------------------------------------------------------------------------


def compiled(kind: Kind) -> None:
    module = kind.module()
    torch._dynamo.reset()
    traced = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (LENGTH, OTHER):
        rest = {"inputs": kind.inputs(n)}
        same_with_gradients(partial(traced, **rest), partial(module, **rest), n)


def exported(kind: Kind) -> None:
    module, n = kind.module(), torch.export.Dim("n", min=2, max=4096)
    shapes: dict[str, Any] = {name: {2: n} for name in "qkv"}
    shapes["inputs"] = {name: {1: n} for name in kind.inputs()}
    given = {**dict(zip("qkv", tensors(), strict=True)), "inputs": kind.inputs()}
    program, file = torch.export.export(module, (), given, dynamic_shapes=shapes), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    parts, rest = tensors(OTHER), {"inputs": kind.inputs(OTHER)}
    loaded = torch.export.load(file).module()
    same(loaded(**dict(zip("qkv", parts, strict=True)), **rest), module(*parts, **rest))


def exported_plainly(kind: Kind) -> None:
    module, parts, rest = kind.module(), tensors(), {"inputs": kind.inputs()}
    with composed():
        program = torch.export.export(module, tuple(parts), rest, strict=False)
    assert "attnspec" not in str(program.graph)
    same(program.module()(*parts, **rest), module(*parts, **rest))


def in_onnx(kind: Kind) -> None:
    import onnxruntime

    module, parts, inputs = kind.module().eval(), tensors(), kind.inputs()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    program = torch.onnx.export(module, tuple(parts), kwargs={"inputs": inputs}, verbose=False)
    assert program is not None
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = [each.name for each in session.get_inputs()]
    given = dict(zip(names, (x.numpy() for x in (*parts, *inputs.values())), strict=True))
    same(torch.from_numpy(session.run(None, given)[0]), module(*parts, inputs=inputs))


class _Positional(nn.Module):
    """What torch.jit.trace can call."""

    def __init__(self, module: CompiledAttention) -> None:
        super().__init__()
        self.module = module

    def forward(self, q: Any, k: Any, v: Any, doc: torch.Tensor | None = None) -> Any:
        return self.module(q, k, v, inputs={} if doc is None else {"doc": doc})


def traced(kind: Kind) -> None:
    module = _Positional(kind.module())
    given = (*tensors(), *kind.inputs().values())
    written = torch.jit.trace(module, given, check_trace=False)  # type: ignore[no-untyped-call]
    for n in (LENGTH, OTHER):
        rest = kind.inputs(n)
        same_with_gradients(partial(written, **rest), partial(module, **rest), n)


def scripted(kind: Kind) -> None:
    torch.jit.script(kind.module())


def in_models(kind: Kind) -> None:
    from transformers import (
        BertConfig,
        BertModel,
        GemmaConfig,
        GemmaForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        StaticCache,
    )

    from attnspec.integrations.transformers import convert

    sizes = {"hidden_size": HEADS * SIZE, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    sizes |= {"intermediate_size": 32, "vocab_size": 61}
    own: dict[str, Any] = {"num_key_value_heads": HEADS, "head_dim": SIZE}
    models: tuple[Any, ...] = (
        LlamaForCausalLM(LlamaConfig(**sizes)),
        GemmaForCausalLM(GemmaConfig(**sizes, **own)),
        BertModel(BertConfig(**sizes)),
    )
    for model in models:
        convert(model.eval(), attnspec.parse(f"attention sample {{ {kind.body} }}"))
        torch._dynamo.reset()
        traced: Any = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
        for n in (LENGTH, OTHER):
            given = {"input_ids": torch.arange(n).repeat(2, 1), "attention_mask": torch.ones(2, n)}
            rest = {"attnspec_inputs": kind.inputs(n)} if kind.inputs() else {}
            same(traced(**given, **rest)[0], model(**given, **rest)[0])
    model, ids = models[0], torch.arange(LENGTH).repeat(2, 1)
    cache, rest = StaticCache(config=model.config, max_cache_len=OTHER), {}
    traced, steps = torch.compile(model, fullgraph=True, backend="eager"), []
    with torch.no_grad():
        for first, last in ((0, LENGTH - 2), (LENGTH - 2, LENGTH - 1), (LENGTH - 1, LENGTH)):
            run, reach = (traced, OTHER) if first else (model, last)
            rest = {"attnspec_inputs": kind.inputs(reach)} if kind.inputs() else {}
            at = torch.arange(first, last)[None]
            given = {"position_ids": at, "past_key_values": cache}
            steps.append(run(ids[:, first:last], **given, **rest).logits)
        rest = {"attnspec_inputs": kind.inputs()} if kind.inputs() else {}
        same(torch.cat(steps, 1), model(ids, **rest).logits)


# --- functions of functions -----------------------------------------------------------------------


def _one(kind: Kind, module: CompiledAttention) -> Callable[..., torch.Tensor]:
    """A call for one sample."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *doc: torch.Tensor) -> torch.Tensor:
        inputs = {"doc": doc[0][None]} if doc else {}
        out: torch.Tensor = module(q[None], k[None], v[None], inputs=inputs)[0]
        return out

    return run


def mapped(kind: Kind) -> None:
    module, parts, inputs = kind.module(), tensors(), kind.inputs()
    found = torch.func.vmap(_one(kind, module))(*parts, *inputs.values())
    same(found, module(*parts, inputs=inputs))


def gradients(kind: Kind) -> None:
    module, rest = kind.module(), {"inputs": kind.inputs()}

    def loss(*parts: torch.Tensor) -> torch.Tensor:
        return module(*parts, **rest).square().sum()  # type: ignore[no-any-return]

    parts = [x.requires_grad_() for x in tensors()]
    found = torch.func.grad(loss, (0, 1, 2))(*tensors())
    same(found, torch.autograd.grad(loss(*parts), parts))


def each_gradient(kind: Kind) -> None:
    module, run = kind.module(), _one(kind, kind.module())
    given = *tensors(), *kind.inputs().values()
    loss = torch.func.grad(lambda *x: run(*x).square().sum(), (0, 1, 2))
    found = torch.func.vmap(loss)(*given)
    parts = [x.requires_grad_() for x in tensors()]
    meant = module(*parts, inputs=kind.inputs()).square().sum()
    same(found, torch.autograd.grad(meant, parts))


def forward_mode(kind: Kind) -> None:
    module, rest = kind.module().double(), {"inputs": kind.inputs()}
    parts = tensors(dtype=torch.float64)
    along, step = [torch.randn_like(x) for x in parts], 1e-6
    ends = (
        module(*(x + sign * step * y for x, y in zip(parts, along, strict=True)), **rest)
        for sign in (1, -1)
    )
    slope = (next(ends) - next(ends)) / (2 * step)
    found = torch.func.jvp(lambda *x: module(*x, **rest), tuple(parts), tuple(along))[1]
    same(found, slope, 1e-5)
    with forward_ad.dual_level():
        make: Any = forward_ad.make_dual
        taken: Any = forward_ad.unpack_dual
        dual = [make(x, y) for x, y in zip(parts, along, strict=True)]
        same(taken(module(*dual, **rest)).tangent, slope, 1e-5)


def each_forward_mode(kind: Kind) -> None:
    run, given = _one(kind, kind.module()), (*tensors(), *kind.inputs().values())
    along = torch.randn_like(given[0])

    def slope(q: torch.Tensor, along: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.jvp(lambda q: run(q, *rest), (q,), (along,))[1]
        return found

    found = torch.func.vmap(slope)(given[0], along, *given[1:])
    each = [slope(*(x[i] for x in (given[0], along, *given[1:]))) for i in range(2)]
    same(found, torch.stack(each))


def second_derivatives(kind: Kind) -> None:
    module, rest = kind.module().double(), {"inputs": kind.inputs(6)}
    parts = [x.requires_grad_() for x in tensors(6, torch.float64)]
    assert torch.autograd.gradgradcheck(
        lambda *x: module(*x, **rest), parts, atol=1e-5, fast_mode=True
    )


def second_derivatives_of_a_trace(kind: Kind) -> None:
    module, rest = kind.module(), {"inputs": kind.inputs()}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        parts = [mode.from_tensor(x.requires_grad_()) for x in tensors()]
        (grad,) = torch.autograd.grad(module(*parts, **rest).sum(), parts[:1], create_graph=True)
        torch.autograd.grad(grad.sum(), parts[0])


def forward_mode_of_a_trace(kind: Kind) -> None:
    module, (q, k, v), inputs = kind.module(), tensors(), [*kind.inputs().values()]
    learned = [x.detach() for x in module.parameters()]

    def run(q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.attnspec.attention(
            q, k, v, module.engine.text, learned, inputs
        )[0]
        return out

    torch.func.jvp(run, (q,), (q,))


# --- training ------------------------------------------------------------------------------------


def narrowed(kind: Kind) -> None:
    module, parts, rest = kind.module(), tensors(), {"inputs": kind.inputs()}
    with torch.autocast("cpu", torch.bfloat16):
        out = module(*parts, **rest)
    assert out.dtype == torch.bfloat16
    same(out, module(*(x.bfloat16() for x in parts), **rest))


def checkpointed(kind: Kind) -> None:
    module, rest = kind.module(), {"inputs": kind.inputs()}
    for reentrant in (False, True):
        given = [[x.requires_grad_() for x in tensors()] for _ in range(2)]
        run = partial(module, **rest)
        checkpoint.checkpoint(run, *given[0], use_reentrant=reentrant).square().sum().backward()
        run(*given[1]).square().sum().backward()
        for one, other in zip(*given, strict=True):
            same(one.grad, other.grad)


class _Block(nn.Module):
    """A projection and an attention, as they are trained."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.project = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE)
        self.attention = kind.module()

    def forward(self, x: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = self.project(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        out: torch.Tensor = self.attention(*parts, inputs=inputs)
        return out.square().sum()


def _trained(kind: Kind, rank: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """A step of two ranks is that of one with the samples of both."""
    every = torch.randn(4, LENGTH, HEADS * SIZE, generator=torch.Generator().manual_seed(3))
    alone, block = _Block(kind), _Block(kind)
    (alone(every, kind.inputs(batch=4)) / 2).backward()
    before = {name: x.detach().clone() for name, x in alone.named_parameters()}
    wrapped = wrap(block)
    for step in range(2):
        mine = every[2 * rank : 2 * rank + 2]
        wrapped.zero_grad()
        wrapped(mine, kind.inputs()).backward()
        del step
    grads = dict(alone.named_parameters())
    for name, parameter in block.named_parameters():
        grad: Any = parameter.grad
        found = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        same(found, grads[name].grad, 1e-3)
        held: Any = parameter.detach()
        same(held.full_tensor() if hasattr(held, "full_tensor") else held, before[name])


def replicated(kind: Kind, rank: int) -> None:
    _trained(kind, rank, nn.parallel.DistributedDataParallel)


def sharded(kind: Kind, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))

    _trained(kind, rank, lambda block: cast(nn.Module, fully_shard(block, mesh=mesh)))


# --- the rest ------------------------------------------------------------------------------------


def copied(kind: Kind) -> None:
    module, parts, rest = kind.module(), tensors(), {"inputs": kind.inputs()}
    out = module(*parts, **rest)
    assert torch.equal(copy.deepcopy(module)(*parts, **rest), out)


def pickled(kind: Kind) -> None:
    module, parts, rest = kind.module(), tensors(), {"inputs": kind.inputs()}
    out = module(*parts, **rest)
    assert torch.equal(pickle.loads(pickle.dumps(module))(*parts, **rest), out)


def threaded(kind: Kind) -> None:
    module, lengths = kind.module(), [LENGTH + i % 3 for i in range(6)]
    given = {n: (tensors(n), kind.inputs(n)) for n in lengths}
    outs: dict[int, torch.Tensor] = {}

    def run(i: int) -> None:
        parts, inputs = given[lengths[i]]
        outs[i] = module(*parts, inputs=inputs)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, n in enumerate(lengths):
        parts, inputs = given[n]
        assert torch.equal(outs[i], module(*parts, inputs=inputs))


def faked(kind: Kind) -> None:
    module, rest = kind.module(), {"inputs": kind.inputs()}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        parts = [mode.from_tensor(x.requires_grad_()) for x in tensors()]
        out = module(*parts, **rest)
        grads = torch.autograd.grad(out.sum(), parts)
    assert out.shape == parts[0].shape
    assert [x.shape for x in grads] == [x.shape for x in parts]


def counted(kind: Kind) -> None:
    module, parts, rest = kind.module(), tensors(), {"inputs": kind.inputs()}
    with FlopCounterMode(display=False) as counter:
        module(*parts, **rest)
    text = f"attention sample {{ {kind.body} }}"
    sample = {name: x[0].numpy() for name, x in kind.inputs().items()}
    report = attnspec.parse(text).analyse(
        LENGTH, inputs=sample or None, batch=2, heads=HEADS, head_dim=SIZE
    )
    assert counter.get_total_flops() > 0
    if report.flops is not None and not sample:
        assert counter.get_total_flops() == report.flops


def inferred(kind: Kind) -> None:
    module, rest = kind.module(), {"inputs": kind.inputs()}
    with torch.inference_mode():
        inferred = module(*tensors(), **rest)
    # what was laid out then serves training
    same_with_gradients(partial(module, **rest), partial(kind.module(), **rest))
    same(inferred, module(*tensors(), **rest))


@dataclass(frozen=True)
class Row:
    """What torch is asked for, as the page writes it; `ranks` for two processes; `slow` for what
    takes seconds."""

    title: str
    run: Callable[..., None]
    ranks: bool = False
    slow: bool = False

    def __str__(self) -> str:
        return self.run.__name__


ROWS = (
    Row("`torch.compile(fullgraph=True, dynamic=True)`", compiled, slow=True),
    Row("`torch.export`, dynamic n, saved and loaded", exported, slow=True),
    Row("`torch.export` under `attnspec.runtime.composed()`", exported_plainly, slow=True),
    Row(
        "`torch.compile(fullgraph=True)`: converted Llama, BERT, Gemma; with mask; static cache",
        in_models,
        slow=True,
    ),
    Row("`torch.onnx.export`, of one length", in_onnx, slow=True),
    Row("`torch.jit.trace`, run at other lengths", traced),
    Row("`torch.jit.script`", scripted),
    Row("`vmap`", mapped),
    Row("`torch.func.grad`", gradients),
    Row("`vmap` of `grad`", each_gradient),
    Row("`jvp`, forward mode", forward_mode),
    Row("`vmap` of `jvp`", each_forward_mode),
    Row("derivatives of derivatives", second_derivatives),
    Row("the same of a traced program", second_derivatives_of_a_trace),
    Row("`jvp` of a traced program", forward_mode_of_a_trace),
    Row("autocast", narrowed),
    Row("`checkpoint`, reentrant or not", checkpointed),
    Row("`DistributedDataParallel`, gloo", replicated, ranks=True, slow=True),
    Row("`fully_shard` (FSDP2), gloo", sharded, ranks=True, slow=True),
    Row("`copy.deepcopy`", copied),
    Row("`pickle`", pickled),
    Row("threads", threaded),
    Row("`FakeTensorMode`", faked),
    Row("`FlopCounterMode`", counted),
    Row("`inference_mode`, then training", inferred),
)

WORKS = "works"


def outcome(row: Row, kind: Kind) -> str:
    """ "works", or why it is refused; raises where neither is so."""
    if row.ranks:
        return of_ranks()[f"{row}, {kind}"]
    return _outcome(row.run, kind)


def _outcome(run: Callable[..., None], *given: Any) -> str:
    try:
        run(*given)
    except Exception as error:
        words = refusal_of(error)
        if not words:
            raise
        return words
    return WORKS


def refusal_of(error: BaseException | None) -> str:
    """What this package said, where it was it that raised; nothing else refuses but ONNX, which
    has no operator of ours."""
    while error is not None:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if "No ONNX function found for <OpOverload(op='attnspec.attention'" in str(error):
            return "ONNX has no operator for what numbers decide"
        raised = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
        if raised.startswith("attnspec."):
            return str(error)
        error = error.__cause__ or error.__context__
    return ""


@cache
def of_ranks() -> dict[str, str]:
    """What comes of the rows for two processes, by row and kind."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank), folder], stdout=subprocess.PIPE, cwd=ROOT)
            for rank in range(2)
        ]
        answers = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    first, second = (json.loads(answer.splitlines()[-1]) for answer in answers)
    assert first == second
    return first  # type: ignore[no-any-return]


def answer_as_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    found = {
        f"{row}, {kind}": _outcome(row.run, kind, rank)
        for row in ROWS
        if row.ranks
        for kind in KINDS
    }
    torch.distributed.destroy_process_group()
    print(json.dumps(found))


def line(row: Row, outcomes: Sequence[str]) -> str:
    """What the page says of a row: each kind, and why where one is refused."""
    cells = [found if found == WORKS else "refused" for found in outcomes]
    why = "; ".join(dict.fromkeys(found for found in outcomes if found != WORKS))
    return f"| {row.title} | {' | '.join(cells)} | {why} |"


HEAD = f"| | {' | '.join(kind.title for kind in KINDS)} | |\n|---|{'---|' * len(KINDS)}---|"


def refreshed(page: str) -> str:
    """The page with its table written anew."""
    before, rest = page.split("<!-- transforms -->\n")
    _, after = rest.split("<!-- /transforms -->")
    rows = "\n".join(line(row, [outcome(row, kind) for kind in KINDS]) for row in ROWS)
    return f"{before}<!-- transforms -->\n{HEAD}\n{rows}\n<!-- /transforms -->{after}"


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        answer_as_rank(int(sys.argv[2]), sys.argv[3])
    else:
        path = Path(sys.argv[1])
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")
