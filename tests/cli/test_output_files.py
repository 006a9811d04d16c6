"""Outputs that are no plain files, or that are inputs: nothing is replaced that should stay."""

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command_lines import invoke
from graphs import graph, with_weights
from paths import ROOT
from stored import made

from rewriter.base.errors import UsageError
from rewriter.cli.parameters import check_extra
from rewriter.ir.model import save

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="devices, pipes, links and modes of POSIX")
QUICK = ("--passes", "clean-casts", "--precision", "fp32", "--no-verify", "-q")
TEXT = "g (float[2,8] x) => (float[2,8] y) { y = Sigmoid(x) }"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(graph(TEXT), tmp_path / "m.onnx")


def fix(*arguments: str | Path) -> tuple[int, str]:
    outcome = invoke("fix", *arguments, *QUICK)
    return outcome.exit_code, outcome.output


def program(*arguments: str | Path, **streams: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rewriter", "fix", *map(str, arguments), *QUICK]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, text=True, env=environment, timeout=120, check=False, **streams)  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A device like /dev/null that a mistake may destroy."""
    path = tmp_path / "null"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        path.write_bytes(b"x")
    except (OSError, AttributeError):
        pytest.skip("devices cannot be made here")
    return path


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


class TestModels:
    @pytest.mark.parametrize("name", ["", "/dev/stdout", "/dev/stderr", "/dev/fd/1"])
    def test_a_device_is_refused(self, model: Path, device: Path, name: str) -> None:
        code, output = fix(model, "-o", name or device)
        assert (code, "it is a device, and a model is written to a file" in output) == (2, True)
        assert "--dry-run" in output
        assert stat.S_ISCHR(device.stat().st_mode)

    def test_a_pipe_is_refused(self, model: Path, tmp_path: Path) -> None:
        pipe = fifo(tmp_path)
        code, output = fix(model, "-o", pipe)
        assert (code, "pipe: it is a pipe" in output) == (2, True)
        assert stat.S_ISFIFO(pipe.stat().st_mode)

    @pytest.mark.parametrize("dangling", [False, True], ids=["to a file", "to none"])
    def test_the_target_of_a_link_is_written(self, model: Path, tmp_path: Path, dangling: bool) -> None:
        (tmp_path / "store").mkdir()
        real, link = tmp_path / "store" / "real.onnx", tmp_path / "link.onnx"
        link.symlink_to("store/real.onnx")
        if not dangling:
            real.write_bytes(b"old")
        assert fix(model, "-o", link)[0] == 0
        assert link.is_symlink()
        onnx.checker.check_model(str(real))
        assert [p.name for p in real.parent.iterdir()] == ["real.onnx"]

    def test_data_of_a_linked_output_goes_beside_the_target(self, tmp_path: Path) -> None:
        source = graph(TEXT)
        source.external = True
        (tmp_path / "store").mkdir()
        (tmp_path / "link.onnx").symlink_to("store/real.onnx")
        written = save(source, tmp_path / "link.onnx")
        assert {p.name for p in tmp_path.iterdir()} == {"store", "link.onnx"}
        onnx.checker.check_model(str(written))

    def test_links_in_a_circle_are_an_error(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "a.onnx").symlink_to("b.onnx")
        (tmp_path / "b.onnx").symlink_to("a.onnx")
        code, output = fix(model, "-o", tmp_path / "a.onnx")
        assert (code, "cannot write the model" in output) == (2, True)


class TestReports:
    def test_a_device_stays_one(self, model: Path, device: Path, tmp_path: Path) -> None:
        assert fix(model, "-o", tmp_path / "f.onnx", "--report", device)[0] == 0
        assert stat.S_ISCHR(device.stat().st_mode)

    def test_a_redirected_stream_keeps_what_is_printed(self, model: Path, tmp_path: Path) -> None:
        with (tmp_path / "log").open("w") as log:
            log.write("before\n")
            log.flush()
            assert program(model, "--dry-run", "--report", "/dev/stdout", stdout=log.fileno()).returncode == 0
        lines = (tmp_path / "log").read_text().splitlines()
        assert lines[:2] == ["before", "{"]
        assert lines[-1].startswith("Fixed, NOT verified")

    def test_a_pipe_gets_the_report(self, model: Path, tmp_path: Path) -> None:
        pipe, read = fifo(tmp_path), list[str]()
        reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
        reader.start()
        assert fix(model, "--dry-run", "--report", pipe)[0] == 0
        reader.join(10)
        assert '"pipeline": "clean-casts"' in read[0]
        assert stat.S_ISFIFO(pipe.stat().st_mode)

    def test_a_link_stays_and_its_target_is_replaced(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "r.json").symlink_to("real.json")
        assert fix(model, "--dry-run", "--report", tmp_path / "r.json")[0] == 0
        assert (tmp_path / "r.json").is_symlink()
        assert "clean-casts" in (tmp_path / "real.json").read_text()

    @pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 there")
    def test_file_names_that_are_not_utf8(self, model: Path, tmp_path: Path) -> None:
        """The report is JSON that any reader takes, and has the bytes of the name as Python's escapes."""
        odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff.onnx"))
        save(made(1), odd)
        assert fix(odd, "--in-place", "--report", tmp_path / "r.json")[0] == 0
        report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
        assert report["output"] == f"{tmp_path}/m\\udcff.onnx"
        assert {p.name for p in tmp_path.glob("*.data")} == {"m_.onnx.1.data"}
        whole = invoke("fix", odd, "--dry-run", "--no-verify")
        assert whole.exit_code == 0, "the source is in the metadata of the fixed model"

    def test_a_report_that_cannot_be_written_says_that_the_model_was(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)
        written, report = tmp_path / "f.onnx", tmp_path / "r.json"
        code, output = fix(model, "-o", written, "--report", report)
        assert code == 2
        assert f"{report}: cannot write the report: No space left on device; " in output
        assert f"the model was written to {written}" in output
        assert "Fixed, NOT verified" in output, "the verdict is printed all the same"
        onnx.checker.check_model(str(written))

    def test_a_folder_is_refused_before_the_work(self, model: Path, tmp_path: Path) -> None:
        code, output = fix(model, "-o", tmp_path / "f.onnx", "--report", tmp_path)
        assert (code, "it is a folder" in output) == (2, True)
        assert not (tmp_path / "f.onnx").exists()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755, 0o664], ids=oct)
def test_in_place_keeps_mode_owner_and_link(model: Path, tmp_path: Path, mode: int) -> None:
    model.chmod(mode)
    if os.geteuid() == 0:
        os.chown(model, 12345, 23456)
    link = tmp_path / "link.onnx"
    link.symlink_to("m.onnx")
    before = model.stat()
    assert fix(link, "--in-place")[0] == 0
    after = model.stat()
    assert link.is_symlink() and after.st_ino != before.st_ino, "the target was replaced"
    assert (stat.S_IMODE(after.st_mode), after.st_uid, after.st_gid) == (mode, before.st_uid, before.st_gid)


class TestInputs:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A model with external data, samples, and a folder of them."""
        weights = {"w": np.ones(512, np.float32)}
        text = "g (float[2,512] x, float[512] w) => (float[2,512] y) { y = Add(x, w) }"
        source = with_weights(text, weights).whole()
        options: Any = {"save_as_external_data": True, "location": "weights.data", "size_threshold": 0}
        onnx.save(source, tmp_path / "m.onnx", **options)
        (tmp_path / "samples").mkdir()
        for name in ("data.npz", "samples/0.npz"):
            np.savez(tmp_path / name, x=np.ones((2, 512), np.float32))
        return tmp_path

    NAMED = (("data.npz", ""), ("samples/0.npz", ""), ("weights.data", ""), ("m.onnx", ""))
    LINKED = (("m.onnx", "hard"), ("m.onnx", "symbolic"), ("data.npz", "symbolic"))

    @pytest.mark.parametrize(("name", "link"), NAMED + LINKED)
    def test_an_output_that_is_an_input_is_refused(self, folder: Path, name: str, link: str) -> None:
        inputs = [folder / "m.onnx", folder / "data.npz", folder / "samples", None, 3]
        output = folder / "other" if link else folder / name
        if link:
            output.hardlink_to(folder / name) if link == "hard" else output.symlink_to(name)
        with pytest.raises(UsageError, match="it would overwrite"):
            check_extra("report", output, inputs)

    def test_a_report_may_lie_in_a_folder_of_samples(self, folder: Path) -> None:
        report = folder / "samples" / "r.json"
        for _ in range(2):
            check_extra("report", report, [folder / "m.onnx", folder / "samples"])
            report.write_text("{}")

    COMMANDS = (
        *("fix --in-place --report", "fix --in-place --save-plan", "fix --in-place --json", "fix -o"),
        *("scan --json", "scan --sarif", "scan --report", "verify --json", "locate --report"),
    )

    @pytest.mark.parametrize("line", COMMANDS)
    @pytest.mark.parametrize("name", ["data.npz", "weights.data"])
    def test_every_command_asks_before_the_work(self, folder: Path, line: str, name: str) -> None:
        command, *flags = line.split()
        before = (folder / name).read_bytes()
        models = [folder / "m.onnx"] * (1 if command in ("fix", "scan") else 2)
        outcome = invoke(command, *models, "--inputs", folder / "data.npz", *flags, folder / name)
        assert (outcome.exit_code, "it would overwrite" in outcome.output) == (2, True), outcome.output
        assert (folder / name).read_bytes() == before

    @pytest.mark.skipif(sys.platform == "win32", reason="its paths are shorter")
    def test_names_as_long_as_they_may_be(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        report = Path("y" * 250 + ".json")
        assert invoke("scan", "m.onnx", "--json", report).exit_code == 0
        assert json.loads(report.read_text())
        outcome = invoke("scan", "m.onnx", "--json", Path("y" * 300))
        assert (outcome.exit_code, "File name too long" in outcome.output) == (2, True)

    def test_so_is_the_configuration_in_force(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = folder / "rewriter.toml"
        config.write_text("opset = 17\n")
        monkeypatch.chdir(folder)
        code, output = fix("m.onnx", "--dry-run", "--report", "rewriter.toml")
        assert (code, "it would overwrite" in output) == (2, True)
        assert config.read_text() == "opset = 17\n"
