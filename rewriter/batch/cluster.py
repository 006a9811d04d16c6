"""Runs the models of a batch on a Ray cluster, whose workers need not share our disk.

Models and samples travel as bytes. Ray runs a task again if its worker dies, so that nothing is lost.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rewriter import __version__
from rewriter.batch.child import Child, fix_order, verify_order
from rewriter.batch.machine import Display, Ends, land, memory_needed, workspace
from rewriter.batch.models import Entry
from rewriter.batch.state import Outcome, model_files, option_files
from rewriter.ir.errors import OutputError, UsageError
from rewriter.pipeline.options import DataOptions, EngineOptions
from rewriter.pipeline.schema import declarations

RETRIES = 5
"""Times that Ray runs a task again after the death of its worker."""

WAIT_SECONDS = 0.2

TYPE = "accelerator_type:"
"""Start of the resource by which Ray counts the GPUs of a type."""

VERIFY_OPTIONS = (*declarations(DataOptions), *declarations(EngineOptions))
"""Options of `fix` that `verify` has with the same meaning."""

Packed = Mapping[str, bytes]
"""Contents by path, relative to a folder, with `/`."""


def pack(folder: Path, files: Iterable[Path]) -> Packed:
    """Files, and all below those that are folders."""
    every = (file for path in files for file in (sorted(path.rglob("*")) if path.is_dir() else [path]))
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in every if file.is_file()}


def unpack(packed: Packed, folder: Path) -> None:
    """Writes the files below a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in packed.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@dataclass(frozen=True)
class Task:
    """A model to fix or to verify, without its files.

    Attributes:
        model, result: Their names in their folders.
        named: Options that name files and folders, with their last parts in the order of the contents.
        version: Of the rewriter that sent it.
    """

    model: str
    result: str
    options: Mapping[str, Any]
    named: Sequence[tuple[str, str]]
    limit_s: float
    version: str = __version__


def run_task(task: Task, model: Packed, fixed: Packed | None, *files: Packed) -> tuple[Outcome, Packed]:
    """Fixes a model, or verifies its result `fixed`, on a worker; returns the files that were made, too.

    Args:
        files: The contents of `task.named`.
    """
    if task.version != __version__:
        versions = f"this worker has rewriter {__version__}, and {task.version} sent the model"
        return Outcome("refused", f"{versions}: install one version"), {}
    with tempfile.TemporaryDirectory(prefix="rewriter-batch-") as name, workspace(Path(name)) as parts:
        folder, (result, scratch) = Path(name), parts
        unpack(model, folder / "model")
        options = dict(task.options)
        for number, ((option, last), packed) in enumerate(zip(task.named, files, strict=True)):
            unpack(packed, folder / f"file-{number}")
            path = folder / f"file-{number}" / last
            options[option] = [*options[option], path] if option in task.options else path
        source, target = folder / "model" / task.model, result / task.result
        unpack(fixed or {}, result)
        order = (fix_order if fixed is None else verify_order)(source, target, options, task.limit_s)
        outcome = Child(order, scratch).wait()
        made = pack(result, [result]) if fixed is None else {}
        return replace(outcome, text=outcome.text.replace(f"{folder}/", "")), made


class Cluster:
    """A connection to a Ray cluster.

    Args:
        gpus: That a model reserves while it is fixed.
        jobs: Models at a time; 0: as many as the cluster has CPUs.
        seconds: Deadline of each model.
    """

    def __init__(self, ray: Any, *, gpus: float, jobs: int, seconds: float) -> None:
        self.ray, self.gpus, self.seconds = ray, gpus, seconds
        self.jobs = jobs or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self.shared: dict[Path, Any] = {}
        self.task = ray.remote(run_task)

    def run(self, jobs: Sequence[tuple[Entry, str]], display: Display) -> Ends:
        """Yields each model with its outcome as it ends; closing the generator cancels the others."""
        waiting, running = list(jobs), dict[Any, tuple[Entry, str]]()
        try:
            while waiting or running:
                display.tick()
                while waiting and len(running) < self.jobs:
                    entry, gpu = waiting.pop(0)
                    running[self._submit(entry, gpu)] = entry, gpu
                    display.started(entry, gpu)
                for reference in self.ray.wait(list(running), timeout=WAIT_SECONDS)[0]:
                    entry, gpu = running.pop(reference)
                    yield entry, gpu, self._outcome(entry, gpu, reference)
        finally:
            for reference in running:
                self.ray.cancel(reference, force=True)

    def _outcome(self, entry: Entry, gpu: str, reference: Any) -> Outcome:
        """What a task returned; its death counts as a crash when Ray has run it often enough."""
        outcome: Outcome
        try:
            outcome, files = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            last = str(error).strip().splitlines()[-1]
            return Outcome("crashed", f"Ray ran it {RETRIES + 1} times: {last}")
        if gpu:
            return outcome
        try:
            with workspace(entry.output.parent) as (result, _):
                unpack(files, result)
                return land(entry, outcome, result)
        except (OSError, OutputError) as error:
            return replace(outcome, ending="refused", text=str(error))

    def _submit(self, entry: Entry, gpu: str) -> Any:
        """Starts a task; files that models share are stored once."""
        options = {n: v for n, v in entry.options.items() if not gpu or n in VERIFY_OPTIONS}
        paths = option_files(options)
        named = [(name, path) for name, files in paths.items() for path in files]
        lists = {name: () for name in paths if isinstance(options[name], (list, tuple))}
        plain = {name: value for name, value in options.items() if name not in paths}
        last_parts = [(name, path.name) for name, path in named]
        task = Task(entry.model.name, entry.output.name, {**plain, **lists}, last_parts, self.seconds)
        model, output = entry.model, entry.output
        packed = pack(model.parent, model_files(model))
        fixed = pack(output.parent, model_files(output)) if gpu else None
        files = [self._stored(path) for _, path in named]
        resources = {"num_cpus": 1, "max_retries": RETRIES, **self._resources(entry, gpu)}
        return self.task.options(**resources).remote(task, packed, fixed, *files)

    def _stored(self, path: Path) -> Any:
        if path not in self.shared:
            self.shared[path] = self.ray.put(pack(path.parent, [path]))
        return self.shared[path]

    def _resources(self, entry: Entry, gpu: str) -> dict[str, Any]:
        """What the task reserves. No task asks for more memory than the largest machine has."""
        if gpu:
            return {"num_gpus": 1, "accelerator_type": gpu}
        machines = [node["Resources"].get("memory", 0) for node in self.ray.nodes() if node["Alive"]]
        return {"num_gpus": self.gpus, "memory": min(memory_needed(entry.model), int(max(machines)))}


@contextmanager
def connected(
    address: str, *, gpus: float, jobs: int, seconds: float, verify_on: Sequence[str]
) -> Iterator[Cluster]:
    """Connects to a cluster for the length of the block.

    Raises:
        UsageError: Ray is not installed, does not answer, or has no GPU of a type.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        hint = "pip install ray, on each machine of the cluster"
        raise UsageError("Ray is not installed", where="`ray`", hint=hint) from error
    with redirect_stdout(sys.stderr):  # Ray prints there, until it is shut down; --json - goes there, too
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            what = f"no Ray cluster answers: {str(error).strip().splitlines()[0]}"
            hint = "start one: ray start --head; docs/batch.md shows how"
            raise UsageError(what, where=f"`ray={address}`", hint=hint) from error
        try:
            check_resources(ray.cluster_resources(), gpus=gpus, verify_on=verify_on)
            yield Cluster(ray, gpus=gpus, jobs=jobs, seconds=seconds)
        finally:
            ray.shutdown()


def check_resources(resources: Mapping[str, float], *, gpus: float, verify_on: Sequence[str]) -> None:
    """Ray would wait forever for a CPU or a GPU that no machine has.

    Raises:
        UsageError: one is missing; the message names it.
    """
    hint = "ray start --address=HOST:PORT adds a machine to the cluster"
    if resources.get("CPU", 0.0) < 1.0:
        raise UsageError("no machine of the cluster has a CPU for tasks", where="`ray`", hint=hint)
    if resources.get("GPU", 0.0) < gpus:
        has = f"the cluster has {resources.get('GPU', 0.0):g}"
        raise UsageError(f"{has}, and each model reserves {gpus:g}", where="`gpus`", hint=hint)
    there = [name.removeprefix(TYPE) for name in resources if name.startswith(TYPE)]
    for gpu in verify_on:
        if gpu not in there:
            has = f"it has {', '.join(sorted(there))}" if there else "it reports no types of GPU"
            raise UsageError(f"the cluster has no {gpu}: {has}", where="`verify-on`", hint=hint)
