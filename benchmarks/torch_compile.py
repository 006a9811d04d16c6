"""Latency and error of `torch.compile` in FP16 with CUDA graphs, where the PyTorch model is at hand: on a GPU.

    python benchmarks/torch_compile.py OUT.json [NAME ...]

The networks of models/ are those of the side by side, in full size; each is asked for before it is exported. An error
is the worst relative L2 error of an output against FP32 on the CPU. Latencies are medians of replays between two CUDA
events, as in rewriter/engines.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.side_by_side import MODELS
from models.build import FULL_ONLY
from models.build import MODULES as WITH_SMALL_FORM

MODULES = {**WITH_SMALL_FORM, **FULL_ONLY}
WARM_UP, REPEATS, BATCH = 20, 100, 5


class AtHand(Exception):
    """Carries a module and its sample out of the function that would export it."""


def network(name: str) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """The PyTorch module of a model, and its first sample."""

    def stop(module: torch.nn.Module, sample: dict[str, Any], *_: object, **__: object) -> None:
        raise AtHand(module, sample)

    owner = importlib.import_module(f"models.{MODULES[name]}")
    for exporter in ("export_classic", "export_dynamo"):
        if hasattr(owner, exporter):
            setattr(owner, exporter, stop)
    try:
        getattr(owner, name)(True)
    except AtHand as found:
        module, sample = found.args
        return module.eval(), [torch.from_numpy(array) for array in sample.values()]
    raise ValueError(f"{name} is exported in another way")


def tensors(result: Any) -> list[torch.Tensor]:
    """The outputs, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [one for one in result if isinstance(one, torch.Tensor)]


def half(value: torch.Tensor) -> torch.Tensor:
    return value.cuda().half() if value.dtype == torch.float32 else value.cuda()


def error(exact: list[torch.Tensor], found: list[torch.Tensor]) -> float | None:
    """The worst output's relative L2 error; None if one is not finite."""
    worst = 0.0
    for wanted, value in zip(exact, found, strict=True):
        got = value.double().cpu()
        if not torch.isfinite(got).all():
            return None
        worst = max(worst, float((got - wanted.double()).norm() / wanted.double().norm()))
    return worst


def timed(call: Any) -> list[float]:
    """Microseconds of a run, each the mean of `BATCH` back-to-back runs."""
    times = []
    for number in range(WARM_UP + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(BATCH):
            call()
        end.record()
        end.synchronize()
        if number >= WARM_UP:
            times.append(start.elapsed_time(end) * 1000 / BATCH)
    return times


def measured(name: str) -> dict[str, Any]:
    """One network: compiled, compared and timed."""
    module, sample = network(name)
    with torch.no_grad():
        exact = tensors(module(*sample))
        inputs = [half(value) for value in sample]
        compiled = torch.compile(module.cuda().half(), mode="reduce-overhead")
        start = time.perf_counter()
        for _ in range(3):  # compiles, records a graph, replays it
            found = [value.clone() for value in tensors(compiled(*inputs))]
        seconds = time.perf_counter() - start
        times = timed(lambda: compiled(*inputs))
    return {
        "us": round(statistics.median(times), 1),
        "error": error(exact, found),
        "compile_s": round(seconds, 1),
    }


def main(out: Path, names: list[str]) -> None:
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    found["versions"] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    for name in names or MODELS:
        try:
            found[name] = measured(name)
        except Exception as problem:  # one network must not stop the others
            found[name] = {"problem": f"{type(problem).__name__}: {str(problem)[:300]}"}
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        out.write_text(json.dumps(found, indent=1) + "\n")
        print(name, found[name], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
