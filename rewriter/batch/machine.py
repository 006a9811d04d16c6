"""Runs a batch: what is finished is skipped, the rest is run, and every end is remembered at once."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from rewriter.batch.child import Child, fix_order
from rewriter.batch.models import Entry
from rewriter.batch.state import FINISHED, Outcome, Record, finished, key_of, model_files, save, state_file
from rewriter.ir.children import available_memory
from rewriter.ir.errors import OutputError

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


class Display(Protocol):
    """What the user sees meanwhile."""

    def started(self, entry: Entry, gpu: str = "") -> None:
        """A model starts."""

    def ended(self, record: Record, gpu: str = "") -> None:
        """A model ended, in this run or in an earlier one."""

    def tick(self) -> None:
        """Called many times a second; raises KeyboardInterrupt after Ctrl-C."""


Ends = Generator[tuple[Entry, str, Outcome], None, None]
"""Models as they end, each with the type of GPU ("": it was fixed) and the outcome."""


class Workers(Protocol):
    """What runs the models: this machine, or a cluster."""

    def run(self, jobs: Sequence[tuple[Entry, str]], display: Display) -> Ends:
        """Runs models, each to be fixed ("") or verified on a type of GPU."""
        ...


def run_batch(
    entries: Sequence[Entry],
    workers: Workers,
    display: Display,
    *,
    gpus: Sequence[str] = (),
    again: bool = False,
) -> list[Record]:
    """Runs what is not finished. Returns the records in the order of the entries.

    Args:
        gpus: Types of GPU on which each result is verified.
        again: Run what is finished, too.
    """
    keys: dict[str, str] = {}
    records: dict[str, Record] = {}
    for entry in entries:
        display.tick()
        keys[entry.name] = key_of(entry)
        earlier = None if again else finished(entry, keys[entry.name])
        if earlier is not None:
            wanted = {gpu: verdict for gpu, verdict in earlier.verdicts.items() if gpu in gpus}
            records[entry.name] = replace(earlier, verdicts=wanted)
            display.ended(records[entry.name])

    def run(jobs: list[tuple[Entry, str]]) -> None:
        with closing(workers.run(jobs, display)) as ends:
            for entry, gpu, outcome in ends:
                record = Record(entry, outcome)
                if gpu:
                    verdicts = {**records[entry.name].verdicts, gpu: outcome}
                    record = replace(records[entry.name], verdicts=verdicts)
                records[entry.name] = record
                if record.outcome.ending in FINISHED:
                    save(record, keys[entry.name])
                display.ended(record, gpu)

    run([(entry, "") for entry in entries if entry.name not in records])
    made = [one for one in records.values() if one.entry.output.is_file() and one.outcome.files]
    run([(one.entry, gpu) for one in made for gpu in gpus if gpu not in one.verdicts])
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

    def run(self, jobs: Sequence[tuple[Entry, str]], display: Display) -> Ends:
        """Yields each model with its outcome as it ends; closing the generator stops those that run.

        A model starts if its estimated memory is left, or if nothing else runs: one that is larger than the
        whole budget runs alone.
        """
        waiting, running = [(entry, memory_needed(entry.model)) for entry, _ in jobs], list[_Running]()
        try:
            while waiting or running:
                display.tick()
                while (place := self._next(waiting, running)) is not None:
                    entry, needed = waiting.pop(place)
                    running.append(_Running(entry, needed, self.seconds))
                    display.started(entry)
                for one in list(running):
                    outcome = one.child.poll()
                    if outcome is not None:
                        running.remove(one)
                        outcome = land(one.entry, outcome, one.result)
                        one.close()
                        yield one.entry, "", outcome
                time.sleep(POLL_SECONDS)
        finally:
            for one in running:
                one.close()

    def _next(self, waiting: Sequence[tuple[Entry, int]], running: Sequence[_Running]) -> int | None:
        """The first model in the queue that may start now."""
        if not waiting or len(running) >= self.jobs:
            return None
        left = self.memory_bytes - sum(one.needed for one in running)
        fitting = (i for i, (_, needed) in enumerate(waiting) if not self.memory_bytes or needed <= left)
        return next(fitting, None if running else 0)


class _Running:
    """A model with its child process and its folder."""

    def __init__(self, entry: Entry, needed: int, seconds: float) -> None:
        self.entry, self.needed = entry, needed
        with ExitStack() as stack:
            self.result, scratch = stack.enter_context(workspace(entry.output.parent))
            order = fix_order(entry.model, self.result / entry.output.name, entry.options, seconds)
            self.child = Child(order, scratch)
            stack.callback(self.child.stop)
            self.close = stack.pop_all().close


# -- results come to their place ----------------------------------------------------------------


@contextmanager
def workspace(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Folders for a result and for scratch in a folder, which is made; both are removed at the end.

    Raises:
        OutputError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what, hint = f"cannot make the folder: {error.strerror}", "name another folder with -o"
        raise OutputError(what, where=str(folder), hint=hint) from error
    with tempfile.TemporaryDirectory(prefix=".rewriter-batch-", dir=folder) as name:
        parts = Path(name) / "result", Path(name) / "scratch"
        for part in parts:
            part.mkdir()
        yield parts


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
