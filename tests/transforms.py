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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import attnspec
from attnspec.integrations.transformers import convert
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

    def spec(self) -> attnspec.Spec:
        return attnspec.parse(f"attention sample {{ {self.body} }}")

    def module(self) -> CompiledAttention:
        torch.manual_seed(0)
        module = self.spec().compile(head_size=SIZE)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        return module

    def inputs(self, n: int = LENGTH, batch: int = 2) -> dict[str, Tensor]:
        return {"doc": (torch.arange(n) // 7).repeat(batch, 1)} if "doc" in self.body else {}

    def run(self, n: int = LENGTH, dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
        """A call of its module beside inputs of n positions."""
        return partial(self.module().to(dtype), inputs=self.inputs(n))


KINDS = (
    Kind("graph", "heads 4 causal attend window(before = 9, after = 0) score bias(buckets = 8)"),
    Kind("mechanism", "causal attend linear()"),
    Kind("run-time input", "input doc: ids causal attend same(doc)"),
    Kind("decided by q and k", "causal attend topk(keys = 4)"),
)


def tensors(n: int = LENGTH, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Leaves of a query, a key and a value."""
    generator = torch.Generator().manual_seed(n)
    shape = (2, HEADS, n, SIZE)
    drawn = [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3)]
    return [x.requires_grad_() for x in drawn]


def same(found: Any, meant: Any, allowed: float = 1e-4) -> None:
    torch.testing.assert_close(found, meant, rtol=allowed, atol=allowed)


def loss_of(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *parts: run(*parts).square().sum()


def same_with_gradients(
    run: Callable[..., Tensor], meant: Callable[..., Tensor], n: int = LENGTH
) -> None:
    parts = tensors(n)
    same(run(*parts), meant(*parts))
    found, wanted = (torch.autograd.grad(loss_of(x)(*parts), parts) for x in (run, meant))
    same(found, wanted)


# --- traces --------------------------------------------------------------------------------------


def compiled(kind: Kind) -> None:
    module = kind.module()
    torch._dynamo.reset()
    traced = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (LENGTH, OTHER):
        rest = {"inputs": kind.inputs(n)}
        same_with_gradients(partial(traced, **rest), partial(module, **rest), n)


def exported(kind: Kind) -> None:
    n, file = torch.export.Dim("n", min=2, max=4096), io.BytesIO()
    shapes: dict[str, Any] = {name: {2: n} for name in "qkv"}
    shapes["inputs"] = {name: {1: n} for name in kind.inputs()}
    given = {**dict(zip("qkv", tensors(), strict=True)), "inputs": kind.inputs()}
    torch.export.save(torch.export.export(kind.module(), (), given, dynamic_shapes=shapes), file)
    file.seek(0)
    parts = dict(zip("qkv", tensors(OTHER), strict=True))
    loaded = torch.export.load(file).module()
    same(loaded(**parts, inputs=kind.inputs(OTHER)), kind.run(OTHER)(**parts))


def exported_plainly(kind: Kind) -> None:
    rest = {"inputs": kind.inputs()}
    with composed():
        program = torch.export.export(kind.module(), tuple(tensors()), rest, strict=False)
    assert "attnspec" not in str(program.graph)
    same(program.module()(*tensors(), **rest), kind.run()(*tensors()))


def in_onnx(kind: Kind) -> None:
    import onnxruntime

    module, parts, inputs = kind.module().eval(), [x.detach() for x in tensors()], kind.inputs()
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

    def forward(self, q: Any, k: Any, v: Any, doc: Tensor | None = None) -> Any:
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
    from tiny_models import tiny

    one = {"num_hidden_layers": 1}
    models = tiny("Llama", "ForCausalLM", **one), tiny("Gemma", "ForCausalLM", head_dim=12, **one)
    for model in (*models, tiny("Bert", **one)):
        convert(model, kind.spec())
        torch._dynamo.reset()
        traced: Any = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
        for n in (LENGTH, OTHER):
            given = {"input_ids": torch.arange(n).repeat(2, 1), "attention_mask": torch.ones(2, n)}
            rest = {"attnspec_inputs": kind.inputs(n)} if kind.inputs() else {}
            same(traced(**given, **rest)[0], model(**given, **rest)[0])
    model, ids = models[0], torch.arange(LENGTH).repeat(2, 1)
    cache, steps = transformers.StaticCache(config=model.config, max_cache_len=OTHER), []
    traced = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for first, last in ((0, LENGTH - 2), (LENGTH - 2, LENGTH - 1), (LENGTH - 1, LENGTH)):
            run, reach = (traced, OTHER) if first else (model, last)
            rest = {"attnspec_inputs": kind.inputs(reach)} if kind.inputs() else {}
            given = {"position_ids": torch.arange(first, last)[None], "past_key_values": cache}
            steps.append(run(ids[:, first:last], **given, **rest).logits)
        rest = {"attnspec_inputs": kind.inputs()} if kind.inputs() else {}
        same(torch.cat(steps, 1), model(ids, **rest).logits)


# --- functions of functions -----------------------------------------------------------------------


def _one(kind: Kind) -> Callable[..., Tensor]:
    """A call for one sample."""
    module = kind.module()

    def run(q: Tensor, k: Tensor, v: Tensor, *doc: Tensor) -> Tensor:
        inputs = {"doc": doc[0][None]} if doc else {}
        out: Tensor = module(q[None], k[None], v[None], inputs=inputs)[0]
        return out

    return run


def _each(kind: Kind, of: Callable[..., Any]) -> None:
    """A function of one sample, mapped over several, gives what it gives of each."""
    samples = [*(x.detach() for x in tensors()), *kind.inputs().values()]
    found = torch.func.vmap(of)(*samples)
    alone = [of(*(x[i] for x in samples)) for i in range(2)]
    same(found, tuple(map(torch.stack, zip(*alone, strict=True))))


def mapped(kind: Kind) -> None:
    run = _one(kind)
    _each(kind, lambda *parts: (run(*parts),))


def gradients(kind: Kind) -> None:
    loss, parts = loss_of(kind.run()), tensors()
    found = torch.func.grad(loss, (0, 1, 2))(*(x.detach() for x in parts))
    same(found, torch.autograd.grad(loss(*parts), parts))


def each_gradient(kind: Kind) -> None:
    _each(kind, torch.func.grad(loss_of(_one(kind)), (0, 1, 2)))


def forward_mode(kind: Kind) -> None:
    run = kind.run(dtype=torch.float64)
    parts = tuple(x.detach() for x in tensors(dtype=torch.float64))
    along, step = tuple(torch.randn_like(x) for x in parts), 1e-6
    one, other = (
        run(*(x + sign * step * y for x, y in zip(parts, along, strict=True))) for sign in (1, -1)
    )
    slope = (one - other) / (2 * step)
    same(torch.func.jvp(run, parts, along)[1], slope, 1e-5)
    with forward_ad.dual_level():
        make: Any = forward_ad.make_dual
        taken: Any = forward_ad.unpack_dual
        dual = [make(x, y) for x, y in zip(parts, along, strict=True)]
        same(taken(run(*dual)).tangent, slope, 1e-5)


def each_forward_mode(kind: Kind) -> None:
    run = _one(kind)
    _each(kind, lambda q, *rest: torch.func.jvp(lambda q: run(q, *rest), (q,), (q.cos(),)))


def second_derivatives(kind: Kind) -> None:
    run, parts = kind.run(6, torch.float64), tensors(6, torch.float64)
    assert torch.autograd.gradgradcheck(run, parts, atol=1e-5, fast_mode=True)


def second_derivatives_of_a_trace(kind: Kind) -> None:
    run = kind.run()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        parts = [mode.from_tensor(x) for x in tensors()]
        (grad,) = torch.autograd.grad(run(*parts).sum(), parts[:1], create_graph=True)
        torch.autograd.grad(grad.sum(), parts[0])


def forward_mode_of_a_trace(kind: Kind) -> None:
    given = *(x.detach() for x in tensors()), *kind.inputs().values()
    program = torch.export.export(_Positional(kind.module()), given).module()
    torch.func.jvp(lambda q: program(q, *given[1:]), given[:1], given[:1])


# --- training ------------------------------------------------------------------------------------


def narrowed(kind: Kind) -> None:
    run, parts = kind.run(), tensors()
    with torch.autocast("cpu", torch.bfloat16):
        out = run(*parts)
    assert out.dtype == torch.bfloat16
    same(out, run(*(x.bfloat16() for x in parts)))


def checkpointed(kind: Kind) -> None:
    run = kind.run()
    for reentrant in (False, True):
        given = tensors(), tensors()
        again: Any = partial(checkpoint.checkpoint, run, use_reentrant=reentrant)
        for parts, each in zip(given, (again, run), strict=True):
            each(*parts).square().sum().backward()
        same([x.grad for x in given[0]], [x.grad for x in given[1]])


class _Block(nn.Module):
    """A projection and an attention, as they are trained."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.project = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE)
        self.attention = kind.module()

    def forward(self, x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        parts = self.project(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        out: Tensor = self.attention(*parts, inputs=inputs)
        return out.square().sum()


def _trained(kind: Kind, rank: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """A step of two ranks is that of one with the samples of both."""
    every = torch.randn(4, LENGTH, HEADS * SIZE, generator=torch.Generator().manual_seed(3))
    alone, block = _Block(kind), _Block(kind)
    (alone(every, kind.inputs(batch=4)) / 2).backward()
    wrapped = wrap(block)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(every[2 * rank : 2 * rank + 2], kind.inputs()).backward()
    meant = dict(alone.named_parameters())
    for name, parameter in block.named_parameters():
        whole: list[Any] = [parameter.grad, parameter.detach()]
        grad, kept = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in whole)
        same(grad, meant[name].grad, 1e-3)
        same(kept, meant[name].detach())


def replicated(kind: Kind, rank: int) -> None:
    _trained(kind, rank, nn.parallel.DistributedDataParallel)


def sharded(kind: Kind, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    _trained(kind, rank, lambda block: cast(nn.Module, fully_shard(block, mesh=mesh)))


# --- the rest ------------------------------------------------------------------------------------


def copied(kind: Kind) -> None:
    run = kind.run()
    assert torch.equal(copy.deepcopy(run)(*tensors()), run(*tensors()))


def pickled(kind: Kind) -> None:
    run = kind.run()
    assert torch.equal(pickle.loads(pickle.dumps(run))(*tensors()), run(*tensors()))


def threaded(kind: Kind) -> None:
    module = kind.module()

    def run(n: int) -> Tensor:
        out: Tensor = module(*tensors(n), inputs=kind.inputs(n))
        return out

    lengths = [LENGTH + i % 3 for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        for n, out in zip(lengths, list(pool.map(run, lengths)), strict=True):
            assert torch.equal(out, run(n))


def faked(kind: Kind) -> None:
    run = kind.run()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        parts = [mode.from_tensor(x) for x in tensors()]
        out = run(*parts)
        grads = torch.autograd.grad(out.sum(), parts)
    assert [x.shape for x in (out, *grads)] == [parts[0].shape, *(x.shape for x in parts)]


def counted(kind: Kind) -> None:
    with FlopCounterMode(display=False) as counter:
        kind.run()(*tensors())
    sizes: dict[str, Any] = {"batch": 2, "heads": HEADS, "head_dim": SIZE}
    sample = {name: x[0].numpy() for name, x in kind.inputs().items()}
    report = kind.spec().analyse(LENGTH, inputs=sample or None, **sizes)
    assert counter.get_total_flops() > 0
    if report.flops is not None and not sample:
        assert counter.get_total_flops() == report.flops


def inferred(kind: Kind) -> None:
    run = kind.run()
    with torch.inference_mode():
        inferred = run(*tensors())
    # what was laid out then serves training
    same_with_gradients(run, kind.run())
    same(inferred, run(*tensors()))


@dataclass(frozen=True)
class Row:
    """What torch does, as the page writes it; `ranks`: two processes; `slow`: takes seconds."""

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
    """What this package said if it raised, or ONNX, which has no operator of ours."""
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
