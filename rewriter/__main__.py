"""The program `rewriter`, and `python -m rewriter`."""

from __future__ import annotations

import os
import signal
import sys

from rewriter import __version__

TYPE_CHECKING = False  # as in `rewriter`

if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


def main() -> None:
    """Loads the command line and runs it; Ctrl-C while it loads ends the process immediately."""
    if sys.argv[1:] == ["--version"]:  # answered without loading the libraries
        sys.stdout.write(f"rewriter {__version__}\n")
        return
    signal.signal(signal.SIGINT, _end_at_once)
    # of streams that are closed, the next files would get the numbers, and what is printed
    for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        if stream is None and os.name == "posix":
            os.dup2(os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY), number)
    from rewriter import cli

    try:
        cli.main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends, and its exit code is known


def _end_at_once(_signal: int, _frame: FrameType | None) -> None:
    """There is nothing to clean up yet, and an exception during an import can end as another one."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
