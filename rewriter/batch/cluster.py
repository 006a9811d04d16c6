"""Runs the models of a batch on a Ray cluster, whose workers need not share our disk.

Ray runs a task again if its worker or its machine dies, so that nothing is lost.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rewriter.batch import memory, packing
from rewriter.batch.entry import Entry, Outcome
from rewriter.batch.flags import paths
from rewriter.batch.packing import Packed
from rewriter.batch.remote import Task, run
from rewriter.batch.run import Display, Fixed, Verified
from rewriter.batch.staging import land, workspace
from rewriter.errors import OutputError, UsageError
from rewriter.pipeline.declaration import declarations
from rewriter.pipeline.options import DataOptions, EngineOptions

RETRIES = 5
"""Times that Ray runs a task again after the death of its worker."""

WAIT_SECONDS = 0.2

TYPE = "accelerator_type:"
"""Start of the resource by which Ray counts the GPUs of a type."""

VERIFY_OPTIONS = (*declarations(DataOptions), *declarations(EngineOptions))
"""Options of `fix` that `verify` has with the same meaning."""


@dataclass(frozen=True)
class Job:
    """A model to fix, or to verify on a type of GPU."""

    entry: Entry
    gpu: str = ""


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
        self.task = ray.remote(run)

    def fix(self, entries: Sequence[Entry], display: Display) -> Generator[Fixed, None, None]:
        """Yields each model with its outcome as it ends; closing the generator cancels the others."""
        for job, outcome, files in self._results([Job(entry) for entry in entries], display):
            yield job.entry, _landed(job.entry, outcome, files)

    def verify(self, pairs: Sequence[tuple[Entry, str]], display: Display) -> Generator[Verified, None, None]:
        """Yields the verdict on each fixed model on each type of GPU as it ends."""
        for job, outcome, _ in self._results([Job(entry, gpu) for entry, gpu in pairs], display):
            yield job.entry, job.gpu, outcome

    def _results(self, jobs: Sequence[Job], display: Display) -> Iterator[tuple[Job, Outcome, Packed]]:
        waiting, running = list(jobs), dict[Any, Job]()
        try:
            while waiting or running:
                display.tick()
                while waiting and len(running) < self.jobs:
                    job = waiting.pop(0)
                    running[self._submit(job)] = job
                    display.started(job.entry, job.gpu)
                for reference in self.ray.wait(list(running), timeout=WAIT_SECONDS)[0]:
                    yield running.pop(reference), *self._result(reference)
        finally:
            for reference in running:
                self.ray.cancel(reference, force=True)

    def _result(self, reference: Any) -> tuple[Outcome, Packed]:
        """What a task returned; its death counts as a crash when Ray has run it often enough."""
        try:
            outcome, files = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            last = str(error).strip().splitlines()[-1]
            return Outcome("crashed", f"Ray ran it {RETRIES + 1} times: {last}"), {}
        return outcome, files

    def _submit(self, job: Job) -> Any:
        """Starts a task; files that models share are stored once."""
        entry, options = job.entry, dict(job.entry.options)
        if job.gpu:
            options = {name: value for name, value in options.items() if name in VERIFY_OPTIONS}
        named = [(name, path) for name, files in paths(options).items() for path in files]
        plain = {name: value for name, value in options.items() if name not in dict(named)}
        lists: dict[str, Any] = {n: () for n, _ in named if isinstance(options[n], (list, tuple))}
        task = Task(
            entry.model.name, entry.output.name, plain | lists, [(n, p.name) for n, p in named], self.seconds
        )
        files = [self._stored(path) for _, path in named]
        fixed = packing.pack_model(entry.output) if job.gpu else None
        model = packing.pack_model(entry.model)
        resources = {"num_cpus": 1, "max_retries": RETRIES, **self._resources(job)}
        return self.task.options(**resources).remote(task, model, fixed, *files)

    def _stored(self, path: Path) -> Any:
        if path not in self.shared:
            self.shared[path] = self.ray.put(packing.pack(path))
        return self.shared[path]

    def _resources(self, job: Job) -> dict[str, Any]:
        """What the task reserves. No task asks for more memory than the largest machine has."""
        if job.gpu:
            return {"num_gpus": 1, "accelerator_type": job.gpu}
        machines = [node["Resources"].get("memory", 0) for node in self.ray.nodes() if node["Alive"]]
        needed = min(memory.needed(job.entry.model), int(max(machines)))
        return {"num_gpus": self.gpus, "memory": needed}


def _landed(entry: Entry, outcome: Outcome, files: Packed) -> Outcome:
    try:
        with workspace(entry) as folder:
            packing.unpack(files, folder / "result")
            return land(entry, outcome, folder / "result")
    except (OSError, OutputError) as error:
        return replace(outcome, ending="refused", text=str(error))


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
        raise UsageError("Ray is not installed", where="--ray", hint=hint) from error
    with redirect_stdout(sys.stderr):  # Ray prints there, until it is shut down; --json - goes there, too
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            hint = "start one: ray start --head; docs/batch.md shows how"
            first = str(error).strip().splitlines()[0]
            raise UsageError(
                f"no Ray cluster answers: {first}", where=f"--ray {address}", hint=hint
            ) from error
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
        raise UsageError("no machine of the cluster has a CPU for tasks", where="--ray", hint=hint)
    if resources.get("GPU", 0.0) < gpus:
        has = f"the cluster has {resources.get('GPU', 0.0):g}"
        raise UsageError(f"{has}, and each model reserves {gpus:g}", where="--gpus", hint=hint)
    there = [name.removeprefix(TYPE) for name in resources if name.startswith(TYPE)]
    for gpu in verify_on:
        if gpu not in there:
            has = f"it has {', '.join(sorted(there))}" if there else "it reports no types of GPU"
            hint = "name one of them, or add a machine to the cluster"
            raise UsageError(f"the cluster has no {gpu}: {has}", where="--verify-on", hint=hint)
