"""Runs a batch: what is finished is skipped, the rest is run, and every end is remembered at once."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rewriter.batch.child import Process, Task
from rewriter.batch.models import Entry
from rewriter.batch.state import FINISHED, Outcome, Record, finished, key_of, model_files, save, state_file
from rewriter.ir.children import available_memory
from rewriter.ir.errors import OutputError

if TYPE_CHECKING:
    from rewriter.batch.cluster import Cluster
    from rewriter.batch.summary import Bars

POLL_SECONDS = 0.05

GIB = 2**30

BASE_BYTES = 0.8 * GIB
"""For what does not grow with the weights. Measured on a model of 16 KB: 0.23 GiB; the rest is for samples
and activations, which the size of a file does not tell."""

BYTES_PER_BYTE = 8
"""Memory of `fix` for each byte of a model and its weights. Measured with all its processes (PSS) on chains
of MatMuls of 0.20 and 0.56 GiB, TensorRT-RTX's build included: 5.7 and 5.6."""

SHARE = 0.8
"""Of the free memory, that a batch may use."""


Ends = Generator[tuple[Entry, Outcome], None, None]
"""Models as they end."""


def run_batch(
    entries: Sequence[Entry], workers: Processes | Cluster, display: Bars, *, again: bool = False
) -> list[Record]:
    """Runs what is not finished. Returns the records in the order of the entries.

    Args:
        again: Run what is finished, too.
    """
    keys: dict[str, str] = {}
    records: dict[str, Record] = {}
    for entry in entries:
        display.tick()
        keys[entry.name] = key_of(entry)
        earlier = None if again else finished(entry, keys[entry.name])
        if earlier is not None:
            records[entry.name] = earlier
            display.ended(earlier)
    with closing(workers.run([one for one in entries if one.name not in records], display)) as ends:
        for entry, outcome in ends:
            records[entry.name] = record = Record(entry, outcome)
            if outcome.ending in FINISHED:
                save(record, keys[entry.name])
            display.ended(record)
    return [records[entry.name] for entry in entries]


def memory_needed(model: Path) -> int:
    """Estimated bytes that `fix` needs for a model; 0.8 GiB and 8 times the model with its weights."""
    size = sum(file.stat().st_size for file in model_files(model) if file.is_file())
    return int(BASE_BYTES + BYTES_PER_BYTE * size)


def memory_budget() -> int:
    """Bytes that a batch may use on this machine; 0 if the system does not report them."""
    return int(SHARE * available_memory())


@dataclass(frozen=True)
class Processes:
    """Runs models in child processes of this machine.

    Attributes:
        jobs: Models at a time.
        memory_bytes: For all of them together; 0: no limit.
        seconds: Deadline of each model.
    """

    jobs: int
    memory_bytes: int
    seconds: float

    def run(self, entries: Sequence[Entry], display: Bars) -> Ends:
        """Yields each model with its outcome as it ends; closing the generator stops those that run.

        A model starts if its estimated memory is left, or if nothing else runs: one that is larger than the
        whole budget runs alone.
        """
        waiting = [(entry, memory_needed(entry.model)) for entry in entries]
        running = dict[Future[Outcome], tuple[Entry, int, Process]]()
        with ThreadPoolExecutor(self.jobs) as threads:
            try:
                while waiting or running:
                    display.tick()
                    while (
                        place := self._next(waiting, [needed for _, needed, _ in running.values()])
                    ) is not None:
                        entry, needed = waiting.pop(place)
                        process = Process(Task(entry.model, entry.output, self.seconds, entry.options))
                        running[threads.submit(_fixed, entry, process)] = entry, needed, process
                    for future in wait(running, POLL_SECONDS, FIRST_COMPLETED).done:
                        yield running.pop(future)[0], future.result()
            finally:
                for _, _, process in running.values():
                    process.stop()

    def _next(self, waiting: Sequence[tuple[Entry, int]], running: Sequence[int]) -> int | None:
        """The first model in the queue that may start now, beside those that need `running` bytes."""
        if not waiting or len(running) >= self.jobs:
            return None
        left = self.memory_bytes - sum(running)
        fitting = (i for i, (_, needed) in enumerate(waiting) if not self.memory_bytes or needed <= left)
        return next(fitting, None if running else 0)


def _fixed(entry: Entry, process: Process) -> Outcome:
    """Waits for the process, whose result comes to its place when it is whole."""
    try:
        with workspace(entry.output.parent) as result:
            process.task = replace(process.task, fixed=result / entry.output.name)
            return land(entry, process.run(), result)
    except (OSError, OutputError) as error:
        return Outcome("refused", str(error))


# -- results come to their place ----------------------------------------------------------------


@contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """A folder for a result in a folder, which is made; it is removed at the end.

    Raises:
        OutputError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what, hint = f"cannot make the folder: {error.strerror}", "name another folder with -o"
        raise OutputError(what, where=str(folder), hint=hint) from error
    with tempfile.TemporaryDirectory(prefix=".rewriter-batch-", dir=folder) as name:
        yield Path(name)


def land(entry: Entry, outcome: Outcome, result: Path) -> Outcome:
    """Moves the files of the folder `result` to the output's folder, the model last; the outcome names them.

    The state of an earlier run goes first: a kill in between leaves a model that the next run makes anew.
    """
    try:
        state_file(entry.output).unlink(missing_ok=True)
        files = sorted(result.iterdir(), key=lambda file: file.name == entry.output.name)
        for file in files:
            file.replace(entry.output.with_name(file.name))
    except OSError as error:
        what = f"{entry.output}: cannot write the model: {error.strerror}"
        return replace(outcome, ending="refused", text=f"{what}; check permissions and the free space")
    return replace(outcome, files=tuple(file.name for file in files))
