"""Runs a batch: what is finished is skipped, the rest is run, and every end is remembered at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace

from rewriter.batch.child import Process
from rewriter.batch.models import Entry
from rewriter.batch.state import (
    FINISHED,
    Ends,
    Outcome,
    Record,
    finished,
    key_of,
    land,
    memory_needed,
    save,
    workspace,
)
from rewriter.ir.errors import OutputError
from rewriter.ir.model.stopwatch import Progress

POLL_SECONDS = 0.05

Tick = Callable[[], None]
"""Raises what Ctrl-C and requests to end are."""


def run_batch(
    entries: Sequence[Entry],
    run: Callable[[Sequence[Entry], Tick], Ends],
    progress: Progress,
    *,
    again: bool = False,
) -> list[Record]:
    """Runs what is not finished. Returns the records in the order of the entries.

    Args:
        run: Yields each model with its outcome as it ends; closing the generator stops the others.
        again: Run what is finished, too.
    """
    keys: dict[str, str] = {}
    records: dict[str, Record] = {}
    line = ""

    def tick() -> None:
        progress(line, len(records), len(entries))

    def ended(record: Record) -> None:
        nonlocal line
        records[record.entry.name] = record
        when = "earlier" if record.skipped else f"{record.outcome.seconds:.1f} s"
        line = f"[{len(records)}/{len(entries)}] {record.entry.name}: {record.outcome.ending}, {when}"
        tick()

    for entry in entries:
        tick()
        keys[entry.name] = key_of(entry)
        earlier = None if again else finished(entry, keys[entry.name])
        if earlier is not None:
            ended(earlier)
    with closing(run([one for one in entries if one.name not in records], tick)) as ends:
        for entry, outcome in ends:
            record = Record(entry, outcome)
            if outcome.ending in FINISHED:
                save(record, keys[entry.name])
            ended(record)
    return [records[entry.name] for entry in entries]


@dataclass(frozen=True)
class Processes:
    """Runs models in child processes of this machine.

    Attributes:
        jobs: Models at a time, if the largest fits so many times into the memory.
        memory_bytes: For all of them together; 0: no limit.
        seconds: Deadline of each model.
    """

    jobs: int
    memory_bytes: int
    seconds: float

    def run(self, entries: Sequence[Entry], tick: Tick) -> Ends:
        """Yields each model with its outcome as it ends; closing the generator stops those that run."""
        largest = max((memory_needed(entry.model) for entry in entries), default=1)
        jobs = min(self.jobs, self.memory_bytes // largest) if self.memory_bytes else self.jobs
        processes = [Process(entry, self.seconds) for entry in entries]
        with ThreadPoolExecutor(max(1, jobs)) as threads:
            pairs = zip(entries, processes, strict=True)
            running = {threads.submit(_fixed, entry, process): entry for entry, process in pairs}
            try:
                while running:
                    tick()
                    for future in wait(running, POLL_SECONDS, FIRST_COMPLETED).done:
                        yield running.pop(future), future.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                for process in processes:
                    process.stop()


def _fixed(entry: Entry, process: Process) -> Outcome:
    """Waits for the process, whose result comes to its place when it is whole."""
    try:
        with workspace(entry.output.parent) as result:
            process.entry = replace(entry, output=result / entry.output.name)
            return land(entry, process.run(), result)
    except (OSError, OutputError) as error:
        return Outcome("refused", str(error))
