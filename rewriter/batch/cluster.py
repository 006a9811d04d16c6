"""Runs the models of a batch on a Ray cluster, whose workers need not share our disk.

Models and samples travel as bytes. Ray runs a task again if its worker dies, so that nothing is lost. Ray
itself has a process of its own, which ends if the head of the cluster dies.
"""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rewriter import __version__
from rewriter.base import sandbox
from rewriter.base.errors import NativeError, RewriterError, UsageError
from rewriter.batch.machine import Process, Tick, error_line, make_folder
from rewriter.batch.models import Ends, Entry, Outcome, memory_needed, model_files, option_files
from rewriter.ir.model import data_files, write_text
from rewriter.ir.model.files import publish
from rewriter.ir.model.output_files import work_folder
from rewriter.report.deploy import files_beside

RETRIES = 5  # times that Ray runs a task again after the death of its worker

WAIT_SECONDS = 0.2

CHECK_SECONDS = 5.0  # seconds between two checks of the machines that are alive
NOBODY_SECONDS = 60.0  # seconds that a cluster without a machine for models has to get one again

HEAD_SECONDS = 30
"""Seconds for the head of a cluster to come back, before Ray ends each process that is connected to it."""

ANSWER_SECONDS = 600.0
"""Deadline of one step of the connection, which may send or write a result of several GB."""

Packed = Mapping[str, bytes]  # contents by path, relative to a folder, with `/`


def pack(folder: Path, files: Iterable[Path]) -> Packed:
    """Files, and all below those that are folders."""
    every = (file for path in files for file in (sorted(path.rglob("*")) if path.is_dir() else [path]))
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in every if file.is_file()}


def unpack(packed: Packed, folder: Path) -> None:
    """Writes the files below a folder, which it creates."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in packed.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def run_task(
    entry: Entry, limit_s: float, version: str, paths: Sequence[Path], *contents: Packed
) -> tuple[Outcome, Packed]:
    """Fixes a model on a worker; returns the new files, too.

    Args:
        version: The sender's version of the rewriter.
        paths: The files and folders of the model and its options, on the sending machine.
        contents: Their contents, with the files of weights beside them.
    """
    if version != __version__:
        versions = f"this worker has rewriter {__version__}, and {version} sent the model"
        return Outcome("refused", f"{versions}: install one version"), {}
    with work_folder() as folder:
        result, sent = folder / "result", dict[Any, Path]()
        result.mkdir()
        for number, (path, packed) in enumerate(zip(paths, contents, strict=True)):
            unpack(packed, folder / str(number))
            sent[path] = folder / str(number) / path.name
        options = {option: _moved(value, sent) for option, value in entry.options.items()}
        moved = replace(entry, model=sent[entry.model], output=result / entry.output.name, options=options)
        outcome = Process(moved, limit_s).run()
        made = pack(result, (result / name for name in outcome.files))
        return replace(outcome, text=outcome.text.replace(f"{folder}/", "")), made


def _written(files: Packed, output: Path) -> tuple[str, ...]:
    """Writes a worker's files beside the output, the model last; returns their names."""
    if not files:
        return ()
    make_folder(output)
    with work_folder() as folder:
        unpack(files, folder)
        others = sorted({file.name for file in files_beside(output)} & files.keys())
        for name in others:
            write_text((folder / name).read_text(encoding="utf-8"), output.with_name(name))
        publish(folder / output.name, output)
    return (*others, *(file.name for file in data_files(output)), output.name)


def _moved(value: Any, sent: Mapping[Any, Path]) -> Any:
    """An option with its files' paths on this machine."""
    if isinstance(value, (list, tuple)):
        return [_moved(part, sent) for part in value]
    return sent.get(value, value) if isinstance(value, os.PathLike) else value


class Cluster:
    """This machine in a Ray cluster. Ray ends the process that holds it if the cluster's head dies.

    Args:
        gpus: That a model reserves while it is fixed.
        jobs: Models at a time; 0: as many as the cluster has CPUs.
        seconds: Deadline of each model.

    Raises:
        UsageError: Ray is not installed, does not answer, or has too few GPUs.
    """

    def __init__(self, address: str, *, gpus: float, jobs: int, seconds: float) -> None:
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(HEAD_SECONDS))
        try:
            import ray  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            hint = "pip install ray, on each machine of the cluster"
            raise UsageError("Ray is not installed", option="ray", hint=hint) from error
        self.ray, self.gpus, self.seconds = ray, gpus, seconds
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            what = f"no Ray cluster answers: {str(error).strip().splitlines()[0]}"
            hint = "start one: ray start --head; docs/batch.md shows how"
            raise UsageError(what, option="ray", where=address, hint=hint) from None
        resources = ray.cluster_resources()
        if (gpu_count := resources.get("GPU", 0.0)) < gpus:  # Ray would wait forever
            self.close()
            what = f"the cluster has {gpu_count:g}, and each model reserves {gpus:g}"
            hint = "ray start --address=HOST:PORT adds a machine to the cluster"
            raise UsageError(what, option="gpus", hint=hint)
        self.jobs = jobs or max(1, int(resources.get("CPU", 1)))
        self.shared: dict[Path, Any] = {}
        self.task = ray.remote(run_task)

    def start(self, entries: Sequence[Entry]) -> None:
        self.ends = self._run(entries)

    def next(self) -> tuple[Entry, Outcome] | None:
        return next(self.ends)

    def close(self) -> None:
        self.ray.shutdown()

    def _run(self, entries: Sequence[Entry]) -> Iterator[tuple[Entry, Outcome] | None]:
        """Yields each model with its outcome as it ends, and None while it waits.

        A task that reserves more memory than any machine has, since one died, would wait forever: it is
        started again with what there is, and has crashed if no machine comes for a minute.
        """
        waiting, running, checked = list(entries), dict[Any, tuple[Entry, int]](), time.monotonic()
        had_machine = checked
        while waiting or running:
            while waiting and len(running) < self.jobs:
                running |= self._started(waiting.pop(0))
            for reference in self.ray.wait(list(running), timeout=WAIT_SECONDS)[0]:
                entry, _ = running.pop(reference)
                yield entry, self._outcome(entry, reference)
            if (now := time.monotonic()) > checked + CHECK_SECONDS:
                checked, most = now, self._most_memory()
                had_machine = had_machine if most is None else now
                lost = [task for task, (_, memory) in running.items() if most is None or memory > most]
                for reference in lost if most is not None or now > had_machine + NOBODY_SECONDS else ():
                    self.ray.cancel(reference, force=True)
                    entry, _ = running.pop(reference)
                    if most is None:
                        yield entry, Outcome("crashed", "no remaining machine of the cluster can run it")
                    else:
                        running |= self._started(entry)
            yield None

    def _most_memory(self) -> int | None:
        """Memory of the largest live machine that can run a model; None if there is none."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        able = [node for node in nodes if node.get("CPU", 0) >= 1 and node.get("GPU", 0) >= self.gpus]
        return max((int(node.get("memory", 0)) for node in able), default=None)

    def _outcome(self, entry: Entry, reference: Any) -> Outcome:
        """The outcome that a task returned; if it died as often as Ray retries it, a crash."""
        outcome: Outcome
        try:
            outcome, files = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            last = str(error).strip().splitlines()[-1]
            return Outcome("crashed", f"Ray ran it {RETRIES + 1} times: {last}")
        try:
            return replace(outcome, files=_written(files, entry.output))
        except RewriterError as error:
            return Outcome("refused", error_line(error))

    def _started(self, entry: Entry) -> dict[Any, tuple[Entry, int]]:
        """Starts a task, with the bytes that it reserves; files that models share are stored once."""
        packed: dict[Path, Any] = {entry.model: pack(entry.model.parent, model_files(entry.model))}
        for path in (path for paths in option_files(entry.options).values() for path in paths):
            if path not in self.shared:
                self.shared[path] = self.ray.put(pack(path.parent, [path]))
            packed[path] = self.shared[path]
        memory = min(memory_needed(entry.model), self._most_memory() or 0)
        resources = {"num_cpus": 1, "num_gpus": self.gpus, "memory": memory, "max_retries": RETRIES}
        task = self.task.options(**resources)
        reference = task.remote(entry, self.seconds, __version__, list(packed), *packed.values())
        return {reference: (entry, memory)}


@dataclass(frozen=True)
class Connection:
    """A member of a cluster in a process of its own, so that this one survives the cluster."""

    member: sandbox.AnyWorker

    def run(self, entries: Sequence[Entry], tick: Tick) -> Ends:
        """Yields each model with its outcome as it ends; the rest has crashed if the cluster is lost."""
        left = {entry.name: entry for entry in entries}
        try:
            self.member.call("start", entries)
            while left:
                tick()
                if (end := self.member.call("next", limit_s=ANSWER_SECONDS)) is not None:
                    yield left.pop(end[0].name), end[1]
        except NativeError as error:
            what = f"the cluster is lost ({error.cause or error.what}): start its head again, then the batch"
            yield from ((entry, Outcome("crashed", what)) for entry in left.values())


@contextmanager
def connected(address: str, *, gpus: float, jobs: int, seconds: float) -> Iterator[Connection]:
    """Connects to a cluster for the length of the block; raises as `Cluster` does."""
    join = partial(Cluster, address, gpus=gpus, jobs=jobs, seconds=seconds)
    doing = "the connection to Ray"
    with closing(sandbox.worker(join, doing=doing, limit_s=ANSWER_SECONDS, limited=False)) as member:
        yield Connection(member)
