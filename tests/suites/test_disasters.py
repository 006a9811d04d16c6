"""Kills, full disks, read-only folders and rival writers leave a whole model, the old one or the new."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nightly import sized
from paths import ROOT
from stored import foreign, made, value

from rewriter.base import sandbox
from rewriter.base.errors import OutputError
from rewriter.ir.model import save

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks, signals and limits of POSIX")
COMMANDS = sized(4, 50)  # moments at which the command is ended, by each signal

GONE_S = 20.0
"""Time for children to end; without a connection to their parent they would go on for a minute and more."""


def in_a_fork(work: Callable[[], object]) -> int:
    """The exit code of `work` in a child: 0, 1 for an `OutputError`, 2 for anything else."""
    child = os.fork()
    if not child:
        try:
            work()
        except OutputError:
            os._exit(1)
        except BaseException:
            os._exit(2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Command:
    """`rewriter fix` as a process of its own, with a TMPDIR of its own.

    Args:
        folder: Gets the model, its data and the TMPDIR.
        location: The data file; a second model shares it unless it is named after the first.
    """

    def __init__(self, folder: Path, location: str, *, in_place: bool) -> None:
        self.folder, self.temporary = folder, folder / "tmp"
        self.temporary.mkdir(parents=True)
        source = foreign(folder / "m.onnx", 1, location)
        if location != "m.onnx.data":
            shutil.copyfile(source, folder / "copy.onnx")
        output = source if in_place else folder / "out.onnx"
        command = [sys.executable, "-m", "rewriter", "fix", source, "-o", output, "--in-place", "-q"]
        environment = {**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [*map(str, command), "--no-build"], env=environment, stderr=subprocess.PIPE, text=True
        )

    def end(self, number: int = 0) -> str:
        """Sends a signal, unless it is 0; returns what the command printed as an error."""
        if number:
            self.process.send_signal(number)
        return self.process.communicate(timeout=300)[1]

    def relatives(self) -> list[int]:
        """The processes with this TMPDIR, the command and its children."""
        mark = f"TMPDIR={self.temporary}".encode()
        return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _has(p, mark)]


def _has(process: Path, entry: bytes) -> bool:
    try:
        return entry in (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it ended, or is somebody else's
        return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The seconds of the command until its own end."""
    begin = time.perf_counter()
    assert Command(tmp_path_factory.mktemp("whole"), "m.onnx.data", in_place=False).end() == ""
    return time.perf_counter() - begin


CASES = [(location, in_place) for location in ("m.onnx.data", "shared.data") for in_place in (False, True)]


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_command_can_be_ended_at_any_time(tmp_path: Path, number: signal.Signals, whole: float) -> None:
    """Models stay whole, and no child goes on; after SIGTERM no temporary file is left."""
    ended = 0
    for moment in range(COMMANDS):
        location, in_place = CASES[moment % len(CASES)]
        command = Command(tmp_path / str(moment), location, in_place=in_place)
        time.sleep(whole * (moment + 0.5) / COMMANDS)
        words = command.end(number)
        ended += command.process.returncode != 0
        assert "Traceback" not in words
        for model in command.folder.glob("*.onnx"):
            assert value(model) == 1, f"{model.name} after {number.name} at moment {moment}"
        deadline = time.monotonic() + GONE_S
        while command.relatives() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not command.relatives(), f"children go on after {number.name} at moment {moment}"
        if number == signal.SIGTERM:
            assert [path.name for path in command.temporary.iterdir() if path.name != ".ses"] == []
    assert ended, f"every command ended before {number.name} came"


def test_a_full_disk_leaves_the_old_model_and_nothing_else(tmp_path: Path) -> None:
    """A limit on file sizes stands in for the disk: the write fails in the middle."""
    import resource

    path = save(made(1), tmp_path / "m.onnx")
    before = sorted(p.name for p in tmp_path.iterdir())

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        save(made(2), path)

    assert in_a_fork(limited) == 1
    assert value(path) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_folder_without_permission_keeps_its_model(open_folder: Path) -> None:
    path = save(made(1), open_folder / "m.onnx")
    for file in open_folder.iterdir():
        file.chmod(0o444)
    open_folder.chmod(0o555)

    def as_nobody() -> None:
        sandbox.inside = True  # the warm ones are root's
        if os.geteuid() == 0:  # root may write anywhere
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
        save(made(2), path)

    assert in_a_fork(as_nobody) == 1
    assert value(path) == 1
    open_folder.chmod(0o755)


def test_two_writers_leave_one_whole_model(tmp_path: Path) -> None:
    """Both replace the same model again and again; what is there afterwards is one of theirs."""
    path = save(made(0), tmp_path / "m.onnx")
    forks = []
    for number in (1, 2):
        child = os.fork()
        if not child:
            try:
                for _ in range(sized(20, 300)):
                    save(made(number), path)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        forks.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in forks]
    assert codes == [0, 0]
    assert value(path) in (1, 2)
