"""Runs the commands of the side by side as child processes, with limits on time and memory."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

POLL_S = 0.05
"""Interval, in seconds, between checks of a child's exit and its limits."""

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that limit the threads of numpy's linear algebra and other libraries."""


@dataclass(frozen=True)
class Limits:
    """Resources that a child process may use before it is stopped.

    Attributes:
        seconds: Wall time.
        gigabytes: Resident memory of the process itself, without its children.
        threads: For linear algebra and ONNX Runtime sessions in one child, so that children share the cores.
    """

    seconds: float = 1800.0
    gigabytes: float = math.inf
    threads: int = 2


def child(command: Sequence[str], log: Path, limits: Limits) -> dict[str, Any]:
    """Runs a command from the repository's root; returns seconds, peak memory in MB with its children, and exit code."""
    start = time.perf_counter()
    variables = {**os.environ, **dict.fromkeys(THREADS, str(limits.threads))}
    with (
        log.open("wb") as stream,
        subprocess.Popen(command, stdout=stream, stderr=stream, cwd=ROOT, env=variables) as process,
    ):
        stopped = ""
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if not stopped:
                stopped = _exceeded(process.pid, time.perf_counter() - start, limits)
                if stopped:
                    process.kill()
            time.sleep(POLL_S)
        process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "wall_s": round(time.perf_counter() - start, 2),
        "user_s": round(usage.ru_utime, 2),
        "peak_mb": round(usage.ru_maxrss / 1024),
        "exit_code": process.returncode,
        "note": stopped or last_words(log, process.returncode),
    }


def last_words(log: Path, exit_code: int) -> str:
    """Last line that a failed command printed, without the hint, which is in the log; "" if it did not fail."""
    if not exit_code:
        return ""
    printed = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in printed if line and not line.startswith("what to do:")]
    said = lines[-1].replace(f"{log.parent}/", "") if lines else f"exit code {exit_code}"
    return said[:200]


def _exceeded(pid: int, seconds: float, limits: Limits) -> str:
    """The limit that a running process exceeds, in words; "" if none."""
    if seconds > limits.seconds:
        return f"stopped after {limits.seconds:.0f} s"
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return ""
    used = pages * os.sysconf("SC_PAGE_SIZE") / 1e9
    return f"stopped at {used:.1f} GB" if used > limits.gigabytes else ""
