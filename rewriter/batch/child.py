"""One command on one model in a child process: its crash, its hang and its memory stay its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewriter.batch.state import Ending, Outcome
from rewriter.ir.english import printable
from rewriter.pipeline.options import FixOptions, VerifyOptions
from rewriter.pipeline.schema import PREFIX, Option, Shapes, declarations
from rewriter.runtime.engines.caches import VARIABLE as CACHE
from rewriter.runtime.ranges import kept

GRACE_SECONDS = 5.0
"""Time between the request to end and the kill."""

ENDINGS: Mapping[int, Ending] = {0: "verified", 1: "failed", 2: "refused", 3: "unbuildable"}
"""By exit code, as `rewriter.cli.exits` documents them."""

EMULATION = "emulation"
REPORT, LOG = "report.json", "log.txt"


@dataclass(frozen=True)
class Order:
    """One command for a child process.

    Attributes:
        arguments: After `rewriter`.
        limit_s: Deadline, in seconds.
        on_gpu: True if a verification without a GPU is none.
    """

    arguments: Sequence[str]
    limit_s: float
    on_gpu: bool = False


def fix_order(model: Path, result: Path, options: Mapping[str, Any], limit_s: float) -> Order:
    """The command that fixes a model; `result` is where the model goes."""
    command = ["fix", str(model.absolute()), "-o", str(result.absolute())]
    return Order([*command, *arguments(FixOptions, options)], limit_s)


def verify_order(model: Path, fixed: Path, options: Mapping[str, Any], limit_s: float) -> Order:
    """The command that compares a fixed model with its original."""
    command = ["verify", str(model.absolute()), str(fixed.absolute())]
    command += arguments(VerifyOptions, options)
    return Order(command, limit_s, on_gpu=options.get("engine") != EMULATION)


class Child:
    """A running child process; its report and its log are in the folder `scratch`."""

    def __init__(self, order: Order, scratch: Path) -> None:
        self.order, self.scratch = order, scratch
        self.start = time.monotonic()
        self.stopped = False
        self.peak_bytes = 0
        environment = {n: v for n, v in os.environ.items() if n == CACHE or not n.startswith(PREFIX)}
        environment |= {f"{PREFIX}CONFIG": "none", kept.VARIABLE: "1"}
        with (scratch / LOG).open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rewriter", *order.arguments, "--json", str(scratch / REPORT), "-q"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C comes to us alone, and we stop the child
            )

    def poll(self) -> Outcome | None:
        """The outcome if the process has ended; None while it runs. Past its deadline it is stopped."""
        if self._code() is None and time.monotonic() - self.start > self.order.limit_s:
            self.stopped = True
            self.stop()
        code = self._code()
        return None if code is None else self._outcome(code)

    def wait(self) -> Outcome:
        """Waits for the end."""
        while (outcome := self.poll()) is None:
            time.sleep(0.05)
        return outcome

    def stop(self) -> None:
        """Ends the process and those that it started."""
        for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 60.0)):
            if self._code() is not None:
                return
            os.killpg(self.process.pid, number)
            deadline = time.monotonic() + seconds
            while self._code() is None and time.monotonic() < deadline:
                time.sleep(0.02)

    def _code(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        if self.process.returncode is None:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                self.process.returncode = os.waitstatus_to_exitcode(status)
                self.peak_bytes = usage.ru_maxrss * 1024  # getrusage(2): KiB on Linux
        return self.process.returncode

    def _outcome(self, code: int) -> Outcome:
        seconds = time.monotonic() - self.start
        measured: dict[str, Any] = {"seconds": seconds, "peak_bytes": self.peak_bytes}
        if self.stopped:
            text = f"stopped after {self.order.limit_s:g} s: `time-limit` allows more"
            return Outcome("timed out", text, **measured)
        report = self._report()
        if self.order.on_gpu and report is not None and report["engine"] == EMULATION:
            return Outcome("not run", "the worker has no engine that runs on its GPU", **measured)
        if code in (0, 1, 3) and report is not None:
            ending: Ending = "unchecked" if code == 0 and not report["checks"] else ENDINGS[code]
            return Outcome(ending, _summary(report), **_figures(report), **measured)
        if code in ENDINGS:
            return Outcome(ENDINGS[code], self._log(), **measured)
        return Outcome("crashed", self._crash(code), **measured)

    def _report(self) -> dict[str, Any] | None:
        try:
            read: dict[str, Any] = json.loads((self.scratch / REPORT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return read

    def _log(self) -> str:
        """The error message that the process ended with, without its own paths' long form."""
        text = (self.scratch / LOG).read_text(encoding="utf-8", errors="replace").strip()
        error = text.rpartition("error: ")[2].replace("\n  what to do: ", "; what to do: ")
        return printable(" ".join(error.split())) or "no message"

    def _crash(self, code: int) -> str:
        if code == -signal.SIGKILL:
            return "killed, as a rule because memory ran out: `jobs=1` or `memory` leaves it more"
        last = self._log().splitlines()[-1][-300:]
        return f"signal {-code}" if code < 0 else f"exit code {code}: {last}"


def _summary(report: Mapping[str, Any]) -> str:
    failed = [str(check["summary"]) for check in report["checks"] if check["passed"] is False]
    conclusion = report.get("conclusion")
    if conclusion is None:  # of `verify`: what it ran on decides what it proves
        return "; ".join([f"{report['engine']} on {report['device']}", *failed])
    if conclusion["limit"]:
        return f"{conclusion['limit']}; what to do: {conclusion['remedy']}"
    return "; ".join(failed) or str(conclusion["summary"])


def _figures(report: Mapping[str, Any]) -> dict[str, Any]:
    plan = report.get("plan")
    decisive = [check["outputs"] for check in report["checks"] if check["outputs"]][-1:]
    errors = [float(output["relative_l2"]) for outputs in decisive for output in outputs]
    found: dict[str, Any] = {"error": max(errors)} if errors else {}
    if plan is not None:
        found |= {"fp32_nodes": len(plan["fp32"]) + len(plan["bf16"]), "float_nodes": plan["float_nodes"]}
    return found | {"all_fp32": plan is None and bool(report.get("repairs"))}


# -- options as arguments of the command line ----------------------------------------------------


def arguments(kind: type, options: Mapping[str, Any]) -> list[str]:
    """The arguments that set these options of a command, each as one text `--name=value`.

    Args:
        kind: The class that declares them.
        options: Values by name; None sets nothing.
    """
    declared = declarations(kind)
    return [
        text
        for name, value in options.items()
        if value is not None and name in declared
        for text in _texts(declared[name], value)
    ]


def _texts(option: Option, value: Any) -> Iterator[str]:
    if option.kind is bool:
        yield from filter(None, (option.flag if value else option.off,))
    elif option.kind == Shapes:
        yield from (f"{option.flag}={name}:{'x'.join(map(str, dims))}" for name, dims in value.items())
    elif option.several:
        yield from (f"{option.flag}={part}" for part in value)
    elif isinstance(value, (list, tuple)):
        yield f"{option.flag}={','.join(value)}"
    else:
        yield f"{option.flag}={f'{value:.8%}' if option.read else value}"
