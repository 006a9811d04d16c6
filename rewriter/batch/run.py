"""A whole batch: what is finished is skipped, the rest is run, and every end is remembered at once."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Protocol

from rewriter.batch import record
from rewriter.batch.entry import FINISHED, Entry, Outcome, Record
from rewriter.batch.key import key_of

Fixed = tuple[Entry, Outcome]
Verified = tuple[Entry, str, Outcome]


class Workers(Protocol):
    """What runs the models: this machine, or a cluster."""

    def fix(self, entries: Sequence[Entry], display: Display) -> Generator[Fixed, None, None]:
        """Yields each model with its outcome as it ends."""
        ...


class Prover(Protocol):
    """What verifies results on types of GPU: a cluster."""

    def verify(self, pairs: Sequence[tuple[Entry, str]], display: Display) -> Generator[Verified, None, None]:
        """Yields the verdict on each fixed model on each type of GPU as it ends."""
        ...


class Display(Protocol):
    """What the user sees meanwhile."""

    def started(self, entry: Entry, gpu: str = "") -> None:
        """A model starts."""

    def ended(self, record: Record, gpu: str = "") -> None:
        """A model ended, in this run or in an earlier one."""

    def tick(self) -> None:
        """Called many times a second; raises KeyboardInterrupt after Ctrl-C."""


class Batch:
    """The models with their keys, and the records so far, by name."""

    def __init__(self, entries: Sequence[Entry], *, again: bool, gpus: Sequence[str]) -> None:
        self.entries, self.gpus = entries, gpus
        self.keys: dict[str, str] = {}
        self.records: dict[str, Record] = {}
        self.again = again

    def run(self, workers: Workers, display: Display, prover: Prover | None = None) -> list[Record]:
        """Runs what is not finished. Returns the records in the order of the entries."""
        for entry in self.entries:
            display.tick()
            self._recall(entry, display)
        todo = [entry for entry in self.entries if entry.name not in self.records]
        with closing(workers.fix(todo, display)) as ends:
            for entry, outcome in ends:
                self._keep(Record(entry, outcome), display)
        if prover is not None:
            self._verify(prover, display)
        return [self.records[entry.name] for entry in self.entries]

    def _recall(self, entry: Entry, display: Display) -> None:
        self.keys[entry.name] = key_of(entry)
        earlier = None if self.again else record.finished(entry, self.keys[entry.name])
        if earlier is not None:
            wanted = {gpu: verdict for gpu, verdict in earlier.verdicts.items() if gpu in self.gpus}
            self.records[entry.name] = replace(earlier, verdicts=wanted)
            display.ended(self.records[entry.name])

    def _verify(self, prover: Prover, display: Display) -> None:
        made = [one for one in self.records.values() if one.entry.output.is_file() and one.outcome.files]
        pairs = [(one.entry, gpu) for one in made for gpu in self.gpus if gpu not in one.verdicts]
        if not pairs:
            return
        with closing(prover.verify(pairs, display)) as ends:
            for entry, gpu, verdict in ends:
                earlier = self.records[entry.name]
                self._keep(replace(earlier, verdicts={**earlier.verdicts, gpu: verdict}), display, gpu)

    def _keep(self, one: Record, display: Display, gpu: str = "") -> None:
        self.records[one.entry.name] = one
        if one.outcome.ending in FINISHED:
            record.save(one, self.keys[one.entry.name])
        display.ended(one, gpu)
