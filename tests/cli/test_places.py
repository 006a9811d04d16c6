"""Commands run wherever they are put: homes, folders and streams that cannot be used."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import python
from graphs import graph
from paths import ROOT

from rewriter.ir.model import save

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="homes, users, devices and limits of Linux")
QUICK = ("--no-build", "--passes", "clean-casts", "--precision", "fp32", "--no-verify")
WITHOUT = "warning: it works without a cache: "
Change = Callable[[Path, dict[str, str | None]], None]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(graph("g (float[2,8] x) => (float[2,8] y) { y = Sigmoid(x) }"), tmp_path / "m.onnx")


def program(
    *arguments: str | Path,
    cwd: Path | None = None,
    shell: str = "",
    variables: dict[str, str | None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The program; `shell` is what a shell runs, with the program as `"$@"`."""
    merged = {**os.environ, "PYTHONPATH": str(ROOT), **(variables or {})}
    environment = {name: value for name, value in merged.items() if value is not None}
    command = [sys.executable, "-P", "-m", "rewriter", *map(str, arguments)]
    command = ["bash", "-c", shell, "bash", *command] if shell else command
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=120, check=False
    )


def in_the_way(home: Path, variables: dict[str, str | None]) -> None:
    (home / ".cache").write_text("")


def no_home(home: Path, variables: dict[str, str | None]) -> None:
    variables["HOME"] = str(home / "missing")
    home.rmdir()
    home.write_text("")


def not_writable(home: Path, variables: dict[str, str | None]) -> None:
    variables["HOME"] = "/proc/1"


def a_full_disk(home: Path, variables: dict[str, str | None]) -> None:
    variables["REWRITER_CACHE"] = "/dev/full/cache"


PLACES = [in_the_way, no_home, not_writable, a_full_disk]
COMMANDS = {
    "fix": ("fix", "m.onnx", "-o", "out.onnx", *QUICK),
    "scan": ("scan", "m.onnx"),
    "verify": ("verify", "m.onnx", "m.onnx"),
    "batch": ("batch", "m.onnx", "-o", "out", *QUICK),
    "probe": ("probe",),
}


@pytest.mark.parametrize(
    ("place", "command"),
    [*((place, "scan") for place in PLACES), *((in_the_way, name) for name in COMMANDS if name != "scan")],
)
def test_commands_work_without_a_cache(model: Path, place: Change, command: str) -> None:
    (home := model.parent / "home").mkdir()
    variables: dict[str, str | None] = {"HOME": str(home), "REWRITER_CACHE": None, "XDG_CACHE_HOME": None}
    place(home, variables)
    done = program(*COMMANDS[command], cwd=model.parent, variables=variables)
    assert done.returncode == 0, done.stderr
    first, *others = done.stderr.splitlines()
    assert first.startswith(WITHOUT)
    assert not [line for line in others if WITHOUT in line or "Traceback" in line]


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="becomes another user")
def test_a_user_without_a_name_and_a_home_has_no_cache(tmp_path: Path) -> None:
    """Otherwise a folder called ~ came into the working folder."""
    code = "import os, platformdirs, tempfile; from rewriter.runtime.engines.caches import obstacle\n"
    code += "os.setuid(54321); print(obstacle())"
    tmp_path.chmod(0o777)
    unset = dict.fromkeys(("HOME", "REWRITER_CACHE", "XDG_CACHE_HOME"))
    done = python("-c", code, cwd=tmp_path, **unset)
    assert "this user has no home folder; REWRITER_CACHE may name another folder" in done.stdout, done.stderr
    assert [*tmp_path.iterdir()] == []


STREAMS = {
    '"$@" >&-': (2, "error: standard output: Bad file descriptor: the output is incomplete\n"),
    '"$@" >/dev/full': (2, "error: standard output: No space left on device: the output is incomplete\n"),
    'set -o pipefail; "$@" | true': (0, ""),
    '"$@" 2>&-': (0, ""),
    '"$@" 2>/dev/full': (0, ""),
    '"$@" <&-': (0, ""),
    '"$@" <&- >&- 2>&-': (2, ""),
    'LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 COLUMNS=1 "$@"': (0, ""),
    'ulimit -n 64; "$@"': (0, ""),
    'mkdir gone; cd gone; rmdir ../gone; "$@"': (0, ""),
    'for n in $(seq 30); do mkdir $(printf %0200d 0); cd $(printf %0200d 0); done; "$@"': (0, ""),
}


@pytest.mark.parametrize("shell", STREAMS)
def test_the_result_is_written_whatever_happens_to_streams_and_folders(model: Path, shell: str) -> None:
    output = model.with_name("out.onnx")
    done = program("fix", model, "-o", output, *QUICK, cwd=model.parent, shell=shell)
    assert (done.returncode, done.stderr) == STREAMS[shell]
    assert output.stat().st_size > 0
