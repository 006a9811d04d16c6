"""Runs one function over many items in child processes, so that a crash of native code is an answer.

A child is used again for the next item. One that crashes or exceeds its time is replaced, and its item is
answered with `Crash`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_SPAWN = get_context("spawn")  # a fork would copy the locks of ONNX Runtime's threads


@dataclass(frozen=True)
class Crash:
    """The end of a child without an answer; `how` names its exit code or its time limit."""

    how: str


@dataclass
class _Child(Generic[Item]):
    process: SpawnProcess
    pipe: connection.Connection
    item: Item | None = None
    until: float = 0.0

    @classmethod
    def start(cls, function: Callable[[Item], Any]) -> _Child[Item]:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(function, theirs), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def give(self, item: Item, timeout_s: float) -> None:
        self.item, self.until = item, time.monotonic() + timeout_s
        self.pipe.send(item)

    def end(self) -> str:
        """Ends the process, and returns how it ended."""
        self.pipe.close()
        self.process.join(0.2)
        late = self.process.is_alive()
        self.process.kill()
        self.process.join()
        return "out of time" if late else f"exit code {self.process.exitcode}"


def over(
    items: Iterable[Item], function: Callable[[Item], Answer], *, children: int, timeout_s: float
) -> Iterator[tuple[Item, Answer | Crash]]:
    """Yields every item with its answer, in the order in which they are ready.

    Args:
        function: A function of a module that can be imported; its exceptions are answers of its own.
        children: Number of processes at a time.
        timeout_s: Time limit of one item, the start of a child included.
    """
    waiting = iter(items)
    busy: list[_Child[Item]] = []
    idle = [_Child.start(function) for _ in range(children)]
    try:
        while True:
            while idle and (item := next(waiting, None)) is not None:
                idle[-1].give(item, timeout_s)
                busy.append(idle.pop())
            if not busy:
                return
            for child in _ready(busy):
                busy.remove(child)
                assert child.item is not None
                try:
                    answer = child.pipe.recv() if child.pipe.poll() else None
                except EOFError:
                    answer = None
                if answer is not None:
                    idle.append(child)
                    yield child.item, answer
                    continue
                idle.append(_Child.start(function))
                yield child.item, Crash(child.end())
    finally:
        for child in (*busy, *idle):
            child.end()


def _ready(busy: list[_Child[Item]]) -> list[_Child[Item]]:
    """Waits for children that answered, ended or exceed their time."""
    patience = max(0.0, min(child.until for child in busy) - time.monotonic())
    answered = connection.wait([child.pipe for child in busy], patience)
    now = time.monotonic()
    return [child for child in busy if child.pipe in answered or child.until <= now]


def _serve(function: Callable[[Any], Any], pipe: connection.Connection) -> None:
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        pipe.send(function(item))
