"""Ctrl-C and SIGTERM end every phase of a command without a traceback, and leave no temporary files."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_lines import python
from graphs import graph
from nightly import NIGHTLY
from paths import ROOT

from rewriter import cli
from rewriter.ir.model import save
from rewriter.report.signals import AGAIN_S, current, listening

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
TELEMETRY = ".ses"  # ONNX Runtime's, which is not ours to remove

SCRIPT = """
import os, sys
sent = False
def hook(event, arguments):
    global sent
    if event == {event!r} and not sent and {test}:
        sent = True
        os.kill(os.getpid(), {number})
sys.addaudithook(hook)
from rewriter.__main__ import main
main()"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(graph("g (float[2,8] x) => (float[2,8] y) { y = Sigmoid(x) }"), tmp_path / "m.onnx")


def ended(
    number: signal.Signals, event: str, test: str, *arguments: str | Path
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The program, sent a signal at an audit event; and what it left in its temporary folder."""
    code = SCRIPT.format(event=event, test=test, number=int(number))
    temporary = Path(str(arguments[1])).parent / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
        # nohup and some runners ignore it, and children would, too
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    return done, [path.name for path in temporary.iterdir() if path.name != TELEMETRY]


IMPORTS = ["typer", "rewriter.pipeline.options", "rich.console", "onnx", "rewriter.jobs.scan", "onnxruntime"]
"""From the first import of the command line to libraries that load in the middle of the work."""


@pytest.mark.parametrize("name", IMPORTS if NIGHTLY else [IMPORTS[0], IMPORTS[-1]])
def test_ctrl_c_during_an_import(model: Path, name: str) -> None:
    done, left = ended(signal.SIGINT, "import", f"arguments[0] == {name!r}", "scan", model)
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")
    assert left == []


@pytest.mark.parametrize(
    ("owner", "name"), [(cli, "app"), (cli.Command, "get_params")], ids=["commands", "arguments"]
)
def test_typer(
    owner: object, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """While it reads arguments, Typer turns it into an exit code of 1, without a word."""
    monkeypatch.setattr(gc, "set_threshold", lambda _: None)
    monkeypatch.setattr(owner, name, lambda *_, **__: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(sys, "argv", ["rewriter", "scan", "m.onnx"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert (end.value.code, capfd.readouterr().err.strip()) == (130, "interrupted")


def test_little_is_loaded_before_ctrl_c_is_caught() -> None:
    """Ctrl-C shows a traceback until then, as it does while Python itself starts."""
    code = "import sys, rewriter.__main__; print('typing' in sys.modules)"
    done = python("-S", "-c", code)
    assert done.stdout.split() == ["False"], done.stderr


MOMENTS = [
    pytest.param(signal.SIGTERM, "tempfile.mkdtemp", id="SIGTERM at a new folder"),
    pytest.param(signal.SIGHUP, "tempfile.mkdtemp", id="SIGHUP at a new folder"),
    pytest.param(signal.SIGTERM, "subprocess.Popen", id="SIGTERM in the middle of a child"),
]


@pytest.mark.parametrize(("number", "event"), MOMENTS)
def test_a_request_to_end_removes_temporary_folders(model: Path, number: signal.Signals, event: str) -> None:
    done, left = ended(number, event, "True", "fix", model, "--dry-run")
    assert (done.returncode, done.stderr, left) == (128 + number, "", [])


class Lost:
    """Its destructor receives the signal, and Python ignores exceptions there."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_a_destructor_loses_comes_again() -> None:
    def lose() -> None:
        Lost()
        gc.collect()
        time.sleep(AGAIN_S * 40)

    with listening(), pytest.raises(KeyboardInterrupt):
        lose()


def test_what_was_received_stays_known() -> None:
    with listening() as signals:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signals.check()
        with listening() as inner:
            assert inner is signals
    assert current() is None


def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
