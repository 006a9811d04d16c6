"""Runs one function over many items in worker processes, so that a crash of native code is an answer.

A worker is used again for the next item. One that crashes or exceeds its time is replaced.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from rewriter.base import sandbox
from rewriter.base.errors import NativeError

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Crash:
    """The end of a worker without an answer; `how` is a signal, an exit code or `timeout`."""

    how: str


def over(
    items: Iterable[Item], function: Callable[[Item], Answer], *, children: int, timeout_s: float
) -> Iterator[tuple[Item, Answer | Crash]]:
    """Yields every item with its answer, in the order in which they are ready.

    Args:
        function: A function of a module that can be imported; its exceptions are raised here.
        children: Number of processes at a time.
        timeout_s: Time limit of one item.
    """
    here = threading.local()

    def answered(item: Item) -> tuple[Item, Answer | Crash]:
        if not hasattr(here, "worker") or not here.worker.alive:
            here.worker = sandbox.Worker(None, doing="an item", limit_s=timeout_s)
        try:
            return item, here.worker.call(function, item)
        except NativeError as error:
            return item, Crash(error.cause)

    waiting = iter(items)
    with ThreadPoolExecutor(children) as threads:
        running = {threads.submit(answered, item) for item in islice(waiting, children)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                running |= {threads.submit(answered, item) for item in islice(waiting, 1)}
                yield future.result()
