"""A decoder with its cache in a loop: the user's script with TensorRT engines in place of ONNX Runtime.

    python benchmarks/loop_on_gpu.py [--train 8] [--steps 100] [--engine tensorrt-rtx]

Trains a small byte Llama on the texts of Python's own help for some seconds, exports it with past keys and values, fixes
it, and runs the closed loop: the fixed file, plain FP16 and FP32 (TF32). Then it times every step of the fixed and of
the plain engine in turn, by the device's clock. At last it compares one-row products and one step of a GRU with TF32 and
without. Prints one JSON object. `--engine onnxruntime` tries the script itself where there is no GPU.
"""

import argparse
import hashlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rewriter
from rewriter.base.errors import RewriterError
from rewriter.ir.model import Array
from rewriter.jobs.closed_loop.job import closed_loop
from rewriter.jobs.closed_loop.result import Stream
from rewriter.runtime.engines.measure import EngineCalls
from rewriter.runtime.engines.protocol import MeasureSettings, Variant
from rewriter.runtime.engines.tensor_files import spans_of, write_tensors
from rewriter.runtime.recording.record import Link, RecordedFile, Recording

WIDTH, LAYERS, HEADS, KV_HEADS = 256, 4, 4, 2
DEPTH = WIDTH // HEADS
PROMPT = b"The statement is executed "

SCRIPT = """
import sys, numpy as np, onnxruntime as ort
path, steps = sys.argv[1], int(sys.argv[2])
session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
past = {i.name: np.zeros((1, i.shape[1], 0, i.shape[3]), np.float32) for i in session.get_inputs() if "past" in i.name}
names, ids, tokens, at = [o.name for o in session.get_outputs()], np.frombuffer(PROMPT, np.uint8)[None].astype(np.int64), [], 0
for _ in range(steps):
    feeds = {"ids": ids, "positions": at + np.arange(ids.shape[1])[None], **past}
    out = dict(zip(names, session.run(None, feeds)))
    at += ids.shape[1]
    past = {k.replace("present", "past"): v for k, v in out.items() if k != "logits"}
    tokens.append(int(out["logits"][0, -1].argmax()))
    ids = np.array([[tokens[-1]]])
print(*tokens)
"""


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weight


class Layer(nn.Module):
    """Attention with rotary positions over the cache, and SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = Norm(), Norm()
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * DEPTH, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 704, bias=False) for _ in range(2))
        self.down = nn.Linear(704, WIDTH, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        y, (cos, sin), size = self.before(x), turn, x.shape[:2]
        q, k, v = (w(y).reshape(*size, -1, DEPTH).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = (z * cos + torch.cat([-z[..., DEPTH // 2 :], z[..., : DEPTH // 2]], -1) * sin for z in (q, k))
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        keys, values = (z.repeat_interleave(HEADS // KV_HEADS, 1) for z in (k, v))
        weights = (q @ keys.transpose(2, 3) / math.sqrt(DEPTH) + mask).softmax(-1)
        x = x + self.o((weights @ values).transpose(1, 2).reshape(*size, WIDTH))
        y = self.between(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y)), [k, v]


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(256, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, 256, bias=False)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        rate = 10000.0 ** (-torch.arange(0, DEPTH, 2, device=ids.device) / DEPTH)
        angle = torch.cat([positions[0, :, None] * rate] * 2, -1)
        keys = torch.arange(past[0].shape[2] + ids.shape[1], device=ids.device)
        mask = torch.where(keys[None] <= positions[0][:, None], 0.0, -1e4)
        x, present, turn = self.embed(ids), list[torch.Tensor](), (angle.cos(), angle.sin())
        for number, layer in enumerate(self.layers):
            x, new = layer(x, turn, mask, list(past[2 * number : 2 * number + 2]))
            present += new
        return self.head(self.norm(x)), *present


def empty(batch: int, device: str = "cpu") -> list[torch.Tensor]:
    return [torch.zeros(batch, KV_HEADS, 0, DEPTH, device=device) for _ in range(2 * LAYERS)]


def train(seconds: float) -> Llama:
    from pydoc_data import topics

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode("ascii", "ignore")
    data, model = torch.tensor(list(text), device=device), Llama().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95), weight_decay=0.05)
    length, batch, start = 128, 48 if device == "cuda" else 12, time.monotonic()
    positions, past = torch.arange(length, device=device)[None], empty(batch, device)
    while (share := (time.monotonic() - start) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (0.05 + 0.95 * (1 - share))
        at = torch.randint(0, len(data) - length - 1, (batch, 1), device=device) + positions
        logits = model(data[at], positions, *past)[0]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), data[at + 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"loss {float(loss):.3f}", file=sys.stderr)
    return model.cpu().eval()


def export(
    module: nn.Module,
    arguments: tuple[torch.Tensor, ...],
    path: Path,
    inputs: list[str],
    outputs: list[str],
    axes: Mapping[str, Any] | None = None,
) -> None:
    torch.onnx.export(
        module,
        arguments,
        str(path),
        input_names=inputs,
        output_names=outputs,
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )


def exported(model: Llama, path: Path) -> list[Link]:
    names = [f"{kind}.{n}.{part}" for n in range(LAYERS) for part in "kv" for kind in ("past",)]
    news = [name.replace("past", "present") for name in names]
    axes = {"ids": {1: "new"}, "positions": {1: "new"}, "logits": {1: "new"}}
    axes |= {name: {2: "past"} for name in names} | {name: {2: "all"} for name in news}
    past = [torch.randn(1, KV_HEADS, 3, DEPTH) for _ in names]
    export(
        model,
        (torch.zeros(1, 2, dtype=torch.long), torch.tensor([[3, 4]]), *past),
        path,
        ["ids", "positions", *names],
        ["logits", *news],
        axes,
    )
    return [Link("lm", new, "lm", old, 2, 1) for new, old in zip(news, names, strict=True)]


def samples_of(path: Path, steps: int, folder: Path) -> list[dict[str, Array]]:
    """Feeds of some steps, as a recording keeps them."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names, kept = [o.name for o in session.get_outputs()], list[dict[str, Array]]()
    past = {
        i.name: np.zeros((1, KV_HEADS, 0, DEPTH), np.float32)
        for i in session.get_inputs()
        if "past" in i.name
    }
    ids, at = np.frombuffer(PROMPT, np.uint8)[None].astype(np.int64), 0
    folder.mkdir()
    for step in range(steps):
        feeds = {"ids": ids, "positions": at + np.arange(ids.shape[1])[None], **past}
        if step in (0, 1, 2, 4, 8, 16, 32, 64, steps - 1):
            np.savez(folder / f"{step:04d}.npz", **feeds)
            kept.append(feeds)
        out = dict(zip(names, session.run(None, feeds), strict=True))
        at += ids.shape[1]
        past = {k.replace("present", "past"): v for k, v in out.items() if k != "logits"}
        ids = np.array([[int(np.asarray(out["logits"])[0, -1].argmax())]])
    return kept


class Step(nn.Module):
    """One frame: a product of one row, and one step of a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gru = nn.Linear(128, 128), nn.GRU(128, 128, batch_first=True)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), self.gru(x[:, None], h)[1]


def one_row(engine: str, folder: Path) -> dict[str, float]:
    """Relative L2 difference of FP32 engines with TF32 and without, of one row and of eight."""
    result = {}
    for rows in (1, 8):
        torch.manual_seed(0)
        path, feeds = (
            folder / f"rows{rows}.onnx",
            {"x": torch.randn(rows, 128), "h": torch.randn(1, rows, 128)},
        )
        export(Step().eval(), tuple(feeds.values()), path, ["x", "h"], ["linear", "gru"])
        arrays, values = {name: value.numpy() for name, value in feeds.items()}, []
        for tf32 in (True, False):
            variant = Variant(f"rows{rows}{tf32}", path, (), tf32=tf32)
            with EngineCalls(variant, MeasureSettings(engine, timing=None), folder) as calls:
                values.append(calls.run(arrays))
        for name, exact in values[1].items():
            result[f"{name} of {rows}"] = float(
                np.linalg.norm(values[0][name] - exact) / np.linalg.norm(exact)
            )
    return result


def words(stream: Stream | None, steps: int) -> dict[str, Any]:
    if stream is None:
        return {}
    other = asdict(stream.other) if stream.other else None
    return {"calls": stream.calls, "of": steps, "error": stream.error, "first_other_word": other}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=float, default=8.0, metavar="SECONDS")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--engine", default="tensorrt-rtx")
    options, started = parser.parse_args(), time.monotonic()
    seconds: dict[str, float] = {}
    document: dict[str, Any] = {}

    @contextmanager
    def part(name: str) -> Iterator[None]:
        """Times a part; the others go on if it fails."""
        try:
            yield
        except RewriterError as error:
            document[f"{name} failed"] = str(error)
        seconds[name] = round(time.monotonic() - started - sum(seconds.values()), 1)

    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        folder = Path(work)
        model, script, fixed = folder / "lm.onnx", folder / "generate.py", folder / "fixed.onnx"
        with part("train and export"):
            links = exported(train(options.train), model)
            script.write_text(SCRIPT.replace("PROMPT", repr(PROMPT)), encoding="utf-8")
            samples = samples_of(model, options.steps, folder / "samples")
        with part("fix"):
            found = rewriter.fix(
                model, fixed, inputs=folder / "samples", engine="emulation", repair=False, build=False
            )
            document["file"] = [check.summary for check in found.checks]
            if found.plan is not None:
                document |= {"nodes_in_fp32": len(found.plan.fp32), "float_nodes": found.plan.float_nodes}
        digest, spans = hashlib.sha256(model.read_bytes()).hexdigest(), spans_of(samples)
        recorded = RecordedFile("lm", str(model), digest, "samples", options.steps, spans)
        command = (sys.executable, str(script), str(model), str(options.steps))
        recording = Recording(command, (recorded,), (), tuple(links), (), "", 0, {})
        sample = write_tensors(folder / "sample", samples[-1])
        settings = MeasureSettings(options.engine, timing=None)
        engines: list[EngineCalls] = []
        steps: list[dict[str, Array]] = []

        def load(file: RecordedFile, path: Path) -> Callable[[dict[str, Any]], Mapping[str, Array]]:
            variant = Variant(f"engine{len(engines)}", path, (sample,), shapes=file.shapes)
            engines.append(stack.enter_context(EngineCalls(variant, settings, folder)))
            own, number = engines[-1], len(engines)

            def run(feeds: dict[str, Any]) -> Mapping[str, Array]:
                if number == len(NAMES):
                    steps.append(feeds)
                return own.run(feeds)

            return run

        with part("closed loop"):
            loop = closed_loop(recording, {"lm": fixed}, 300.0, engines=load)
            document |= {"ending": loop.ending, "limit": loop.limit}
            document |= {name: words(getattr(loop, name), options.steps) for name in NAMES}
        us: dict[str, list[float]] = {name: [] for name in NAMES[: len(engines)]}
        with part("timing"):
            for feeds in steps[1:]:
                for name, engine in zip(us, engines, strict=True):
                    us[name].append(statistics.median(engine.time_us(feeds, 3)))
            document["step_us"] = {
                name: {"median": statistics.median(t), "last": t[-1]} for name, t in us.items()
            }
            ratios = (ours / plain for ours, plain in zip(us["fixed"], us["plain"], strict=True))
            document["fixed_over_plain"] = statistics.median(ratios)
        with part("one row"):
            document["tf32_minus_fp32"] = one_row(options.engine, folder)
    print(json.dumps({**document, "seconds": seconds}, indent=1))


NAMES = ("plain", "tf32", "fixed")
"""The runs of a closed loop, in their order."""


if __name__ == "__main__":
    main()
