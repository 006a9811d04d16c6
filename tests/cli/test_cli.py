"""The command line through its real entry point: exit codes, messages, and what lies on the disk after."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command_lines import flat, invoke, python, quick
from graphs import cases, graph
from paths import DOCS, ROOT
from tables import values
from typer.testing import CliRunner

from rewriter import cli
from rewriter.base.errors import UsageError
from rewriter.cli import exits
from rewriter.ir.model import save
from rewriter.pipeline.options import KEYS
from rewriter.pipeline.schema import Text, read
from rewriter.report.progress import progress

WEIGHTS = ", ".join(f"{value:.4f}" for value in np.random.default_rng(0).standard_normal(108))
CONV_CLIP = f"""
    g (float[1,3,8,8] x) => (float[1,4,6,6] y)
    <float[4,3,3,3] w = {{{WEIGHTS}}}, float low = {{0.0}}, float high = {{6.0}}> {{
        c = Conv(x, w) y = Clip(c, low, high) }}"""

CANCELLATION = """
    g (float[1,64] x) => (float[1,64] y)
    <float big = {1000.0}, int64[1] mid = {1}, float[1,1,3] copy = {0, 1, 0}> {
        h = Unsqueeze(x, mid) v = Conv <pads = [1, 1]> (h, copy) i = Squeeze(v, mid) a = Add(i, big)
        y = Sub(a, big) }"""
"""Every range fits into FP16, but its spacing around 1000 is 0.5: the difference is lost. A Conv hides it."""

STRUCTURE = ("--passes", "isolate-clip")
"""Enough for what is tested here, and done in a second: no plan, no build."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Conv and Clip on a 1x3x8x8 input called `x`."""
    return save(graph(CONV_CLIP), tmp_path / "model.onnx")


def test_fixes_and_verifies(model: Path, tmp_path: Path) -> None:
    """The whole way at the default preset; the build part runs where a TensorRT is installed."""
    done = python("-m", "rewriter", "fix", model, "-o", "fixed.onnx", "--report", "report.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Emulated on random data, which is no proof, built without a GPU, " in flat(done.stdout)
    assert "trtexec --onnx=fixed.onnx --stronglyTyped" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr, "no colours and no bars in a pipe"
    types = {t.data_type for t in onnx.load(tmp_path / "fixed.onnx").graph.initializer}
    assert onnx.TensorProto.FLOAT16 in types
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["verified"] is True
    assert written["output"] == "fixed.onnx"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fixed.onnx", "model.onnx", "report.json"]


def test_the_profile_is_what_the_user_says(tmp_path: Path) -> None:
    source = save(graph("g (float[batch,3] x) => (float[batch,3] y) { y = Relu(x) }"), tmp_path / "m.onnx")
    shapes = ("--min-shapes", "x:1x3", "--opt-shapes", "x:4x3", "--max-shapes", "x:8x3")
    done = quick("fix", source, "-o", tmp_path / "f.onnx", *shapes, "--target", "tensorrt-rtx")
    assert done[0] == 0, done[2]
    assert "--minShapes=x:1x3 --optShapes=x:4x3 --maxShapes=x:8x3" in done[1]
    code, _, error = quick("fix", source, "-o", tmp_path / "g.onnx", "--max-shapes", "z:8x3")
    assert (code, (tmp_path / "g.onnx").exists()) == (2, False)
    assert "the model has no input 'z'" in error


def test_a_plugin_library_that_does_not_load_fails_the_build(model: Path, tmp_path: Path) -> None:
    if find_spec("tensorrt_rtx") is None:
        pytest.skip("TensorRT-RTX is not installed")
    library = tmp_path / "plugin.so"
    library.write_text("not a library")
    fixed = tmp_path / "f.onnx"
    code, out, _ = quick("fix", model, "-o", fixed, *STRUCTURE, "--plugin-lib", library)
    assert code == exits.FAILED, out
    assert f"VERIFICATION FAILED (build): {fixed}" in flat(out)
    missing = tmp_path / "gone.so"
    code, _, error = quick("fix", model, "-o", tmp_path / "g.onnx", "--plugin-lib", missing)
    assert (code, (tmp_path / "g.onnx").exists()) == (2, False)
    assert f"no such file: {missing}" in error
    code, _, error = quick("fix", tmp_path / "gone", "-o", tmp_path / "out")  # a recording, misspelt
    assert code == 2 and f"{tmp_path / 'gone'}: no such file" in error


@pytest.mark.parametrize(("strict", "written"), [([], ["f.onnx"]), (["--strict"], [])], ids=["", "strict"])
def test_a_failed_verification_is_1(strict: list[str], written: list[str], tmp_path: Path) -> None:
    source = save(graph(CANCELLATION), tmp_path / "m.onnx")
    code, out, _ = quick("fix", source, "-o", tmp_path / "f.onnx", "--no-repair", *strict)
    assert code == exits.FAILED, out
    assert "VERIFICATION FAILED (emulation)" in flat(out)
    assert [path.name for path in tmp_path.iterdir() if path != source] == written


def test_a_dry_run_reports_and_writes_no_model(model: Path, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    code, out, _ = quick("fix", model, "--dry-run", "--no-verify", "--report", report, *STRUCTURE)
    assert code == 0
    assert "nothing written" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "r.json"]
    assert json.loads(report.read_text())["passes"][0]["changes"][0]["what"] == "Clip became Max and Min"


@values
def test_a_file_named_like_an_option_is_one(line: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "--plugin-lib=evil.onnx"
    model.rename(model.with_name(name))
    monkeypatch.chdir(model.parent)
    done = invoke(*line.replace("{}", name).split())
    assert done.exit_code in (0, 1) or f"error: {name}: " in done.stderr
    if line.startswith("fix"):
        assert f" ./{name} " in done.output, "so that the next command takes it for a file, too"


@pytest.fixture
def shelf(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the model, which is the current one, with files that are none or do not fit it."""
    folder = model.parent
    monkeypatch.chdir(folder)
    (folder / "text.onnx").write_text("version https://git-lfs.github.com/spec/v1\n")
    proto = onnx.load(model)
    proto.graph.node[1].input[0], proto.graph.node[1].name = "nowhere", "the_clip"
    (folder / "invalid.onnx").write_bytes(proto.SerializeToString())
    np.savez(folder / "image.npz", image=np.zeros((1, 3, 8, 8), np.float32))
    np.savez(folder / "two.npz", x=np.zeros((1, 2, 8, 8), np.float32))
    return folder


@values
def test_bad_input_is_2_with_a_message_and_nothing_written(shelf: Path, line: str, words: list[str]) -> None:
    before = sorted(shelf.iterdir())
    given = [word.replace(",", " ") for word in line.format("model.onnx").split()]
    code, out, error = quick("fix", *given, "-o", "f.onnx", "--report", "r.json")
    assert code == exits.BAD_INPUT, out
    assert [word for word in words if word not in error] == []
    assert sorted(shelf.iterdir()) == before


@pytest.mark.parametrize("link", ["", "symlink_to", "hardlink_to"])
def test_the_model_is_not_overwritten_by_accident(model: Path, link: str) -> None:
    before, alias = model.read_bytes(), model
    if link:
        alias = model.with_name("link.onnx")
        getattr(alias, link)(model)
    code, _, error = quick("fix", model, "-o", alias, *STRUCTURE, "--no-verify")
    assert (code, "--in-place" in error) == (exits.BAD_INPUT, True)
    assert model.read_bytes() == before


@values
def test_bad_outputs_are_refused_first(model: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    code, _, error = quick("fix", model, *(a.format(tmp_path) for a in arguments), *STRUCTURE)
    assert code == exits.BAD_INPUT
    assert words in error
    assert list(tmp_path.iterdir()) == [model]


def test_an_output_for_which_the_disk_has_no_room_is_refused_before_the_work(tmp_path: Path) -> None:
    """The weights are a file with a hole of 8 TiB, which needs no room."""
    scaled = "g (float[8] x) => (float[8] y) <float[8] w = {1,2,3,4,5,6,7,8}> { y = Mul(x, w) }"
    proto = graph(scaled).whole()
    weight = proto.graph.initializer[0]
    weight.ClearField("float_data")
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": "w.bin", "offset": "0", "length": "32"}.items():
        weight.external_data.add(key=key, value=value)
    onnx.save(proto, tmp_path / "m.onnx")
    with (tmp_path / "w.bin").open("wb") as hole:
        hole.truncate(2**43)
    code, _, error = quick("fix", tmp_path / "m.onnx", "-o", tmp_path / "f.onnx")
    assert code == exits.BAD_INPUT and "the result needs 4096.0 GiB at least" in error


def test_without_an_output_the_result_lies_beside_the_model(model: Path, tmp_path: Path) -> None:
    code, out, error = quick("fix", model, "--no-verify", *STRUCTURE)
    assert code == 0, error
    written = tmp_path / "model.fixed.onnx"
    assert str(written) in flat(out)
    assert quick("fix", model, "--no-verify", *STRUCTURE)[0] == 0, "the same command twice"
    written.write_bytes(before := b"a file of the user's")
    code, _, error = quick("fix", model, "--no-verify", *STRUCTURE)
    assert (code, written.read_bytes()) == (exits.BAD_INPUT, before)
    assert "it exists" in error and "--in-place" in error


@pytest.mark.parametrize(("line", "answer"), cases("cli/fingers.txt"))
def test_what_the_fingers_expect_is_answered(model: Path, line: str, answer: str) -> None:
    """Options of other tools, and lines that are not whole: one style of error, with what to do."""
    code, out, error = quick(*line.format(model).split())
    assert (code, out) == (exits.BAD_INPUT, "")
    first, second = error.splitlines()
    assert first.startswith("error: ") and second.startswith("  what to do: ")
    assert answer.format(model) in error


@pytest.mark.skipif(sys.platform == "win32", reason="sends itself a POSIX signal")
@pytest.mark.skipif(find_spec("tensorrt_rtx") is None, reason="builds with TensorRT-RTX")
def test_an_interrupt_of_the_build_keeps_the_file_and_says_what_it_lacks(tmp_path: Path) -> None:
    large, written = ROOT / "models" / "rtdetr.onnx", tmp_path / "f.onnx"
    in_a_build = """
import os, signal, threading
import rewriter.cli
from rewriter.verification import build_check
build = build_check.check_build
def interrupted(*arguments, **options):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    return build(*arguments, **options)
build_check.check_build = interrupted
rewriter.cli.main()"""
    done = python("-c", in_a_build, "fix", large, "-o", written)
    assert (done.returncode, done.stdout) == (exits.INTERRUPTED, "")
    interrupted = f"interrupted: {written} is written, but not verified to the end"
    assert done.stderr.splitlines()[-1] == interrupted
    onnx.checker.check_model(str(written))


def test_news_of_a_search_are_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(shown=True) as update:
        for stage in ("passes", "search: 1 plan", "search: 1 plan", "search: 2 plans", "save"):
            update(stage, 0, 0)
    assert capsys.readouterr().err == "search: 1 plan\nsearch: 2 plans\n"
    with progress(shown=False) as update:
        update("search: 1 plan", 0, 0)
    assert capsys.readouterr().err == ""


def test_an_interrupt_that_a_library_swallows_comes_again() -> None:
    with progress(shown=False) as update:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            update("the next stage", 0, 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_sees_progress_and_the_pipe_only_the_report(model: Path) -> None:
    import pty

    master, slave = pty.openpty()
    command = [sys.executable, "-m", "rewriter", "fix", str(model), "--dry-run"]
    done = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, cwd=ROOT)
    os.close(slave)
    drawn = b""
    with contextlib.suppress(OSError):  # end of a pseudo-terminal whose other side is closed
        while part := os.read(master, 4096):  # while it runs: a full pseudo-terminal would block it
            drawn += part
    out, _ = done.communicate(timeout=300)
    assert done.returncode == 0, drawn.decode()
    os.close(master)
    assert b"rewriting: simplify" in drawn and b"\x1b[" in drawn
    assert b"\x1b" not in out


@pytest.mark.parametrize(("text", "code"), [(CONV_CLIP, 0), (CANCELLATION, exits.FAILED)])
def test_a_reader_that_leaves_early_hides_no_verdict(text: str, code: int, tmp_path: Path) -> None:
    source = save(graph(text), tmp_path / "m.onnx")
    command = f"{sys.executable} -m rewriter fix {source} --dry-run --no-repair --no-build -v | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == code
    assert "Error" not in done.stderr and "Traceback" not in done.stderr


def test_a_defect_of_ours_has_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("rewriter.api.fix", broken)
    code, _, error = quick("fix", model, "-o", tmp_path / "f.onnx")
    assert code == exits.DEFECT
    assert "ZeroDivisionError: a defect" in error


@pytest.mark.parametrize("text", ["x", ":1x2", "x:1x", "x:0x3", "x:-1", "x:1,2"])
def test_what_is_no_shape(text: str) -> None:
    with pytest.raises(UsageError, match="a shape is"):
        read(KEYS["input_shapes"], Text(f"image:1x3,{text}"))


SCREEN_LINES, SCREEN_COLUMNS = 24, 80


GROUPS = ["A model", "More"]


def test_help_fits_a_screen_in_groups() -> None:
    lines = python("-m", "rewriter", "--help").stdout.strip().splitlines()
    assert len(lines) < SCREEN_LINES, "the prompt takes one"
    assert max(map(len, lines)) <= SCREEN_COLUMNS
    assert [line.strip("╭─╮ ") for line in lines if line.startswith("╭")] == GROUPS
    assert cli.COMMANDS.keys() - {"help"} <= {line.split()[1] for line in lines if "│" in line}


@pytest.mark.parametrize("command", ["", "fix", "probe", "passes show", "presets", "hook fix"])
def test_a_switch_takes_nothing(command: str) -> None:
    """Typer shows `<bool>` where `--help` and others take no value."""
    assert "<bool>" not in quick(*command.split(), "--help")[1]


@pytest.mark.parametrize(("typed", "offered"), cases("cli/completed.txt"))
def test_the_shell_completes(typed: str, offered: str) -> None:
    """As bash asks, by the variables of the script that `--install-completion` writes."""
    asked = {"COMP_WORDS": f"rewriter {typed}", "COMP_CWORD": str(len(typed.split()))}
    asked["_REWRITER_COMPLETE"] = "complete_bash"
    assert CliRunner().invoke(cli.app, [], env=asked, prog_name="rewriter").stdout.split() == [offered]


def test_a_pass_is_explained() -> None:
    code, out, _ = quick("passes", "show", "merge-projections")
    assert code == 0
    assert "`longest` (a whole number; default 0)" in out
    assert quick("passes", "show", "isolate-clop")[0] == 2


def test_passes_and_presets_are_listed_with_the_default_marked() -> None:
    shown, listed = quick("passes"), quick("passes", "list")
    assert shown == listed
    assert "[structure]" in shown[1] and "* rescale" in shown[1] and "  stamp" not in shown[1]
    assert quick("presets") == quick("presets", "list")
    assert "trt-fp16 (default)" in quick("presets")[1]
    content = {one["name"]: one for one in json.loads(quick("passes", "list", "--json", "-")[1])["passes"]}
    assert content["merge-projections"]["default"]
    assert content["merge-projections"]["options"]["longest"] == {"type": "a whole number", "default": 0}
    content = json.loads(quick("presets", "list", "--json", "-")[1])["presets"]
    assert [one["name"] for one in content if one["default"]] == ["trt-fp16"]


@values
def test_what_a_shell_waits_for_loads_no_library(words: list[str], variables: dict[str, Any]) -> None:
    """Neither onnx nor NumPy, which take longer than all else."""
    code = f"""
import sys
sys.argv[1:] = {words}
from rewriter.__main__ import main
try:
    main()
finally:
    print([name for name in ("numpy", "onnx", "rewriter.jobs") if name in sys.modules])"""
    done = python("-c", code, **variables)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert not words or done.stdout.startswith("rewriter 0.")


CITED = re.compile(r"docs/(?!PAGE)([\w-]+\.md)(?:#([\w-]+))?")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@pytest.mark.parametrize("words", [[], ["fix"], ["passes", "show"]], ids=" ".join)
def test_help_of_a_command_is_its_own(words: list[str]) -> None:
    shown, own = (invoke(*line) for line in (["help", *words], [*words, "--help"]))
    assert shown.exit_code == own.exit_code == 0
    assert shown.output == own.output


def test_help_of_no_command_is_an_error() -> None:
    done = invoke("help", "fixx")
    assert done.exit_code == 2 and "fixx" in done.output


def citations() -> Iterator[tuple[str, str]]:
    """Page and section of what docstrings, comments and messages of the package cite."""
    for path in sorted((ROOT / "rewriter").rglob("*.py")):
        yield from CITED.findall(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("page", "section"), sorted(set(citations())))
def test_what_the_package_cites_exists(page: str, section: str) -> None:
    headings = HEADING.findall((DOCS / page).read_text(encoding="utf-8"))
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    assert not section or section in slugs
