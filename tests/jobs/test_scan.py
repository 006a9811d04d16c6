"""`scan` from the file to the findings: on the case models, as a library, and on the command line."""

import functools
import io
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_lines import flat
from graphs import graph, model
from nightly import small
from paths import MODELS
from tables import values
from typer.testing import CliRunner, Result

import rewriter
from rewriter.base.errors import SEVERITIES
from rewriter.cli import app
from rewriter.hazards import ALREADY_AVOIDED
from rewriter.ir.model import save, write_json
from rewriter.jobs.scan import Finding, ScanResult
from rewriter.report import scan as scan_report
from rewriter.report import terminal

CASES: dict[str, dict[str, Any]] = tomllib.loads((MODELS / "cases.toml").read_text())
BEHAVED = ("resnet", "vit", "convnext", "swin", "mobilenet_v2", "group_norm", "mismatch")
BERT = "bert"  # its sample has padding; its mask constant is NaN in FP16 with and without


MIXED = "mixed_casts"  # garbage if all of it is FP16, but both of its norms stand in FP32 already


@functools.cache
def scanned(name: str) -> ScanResult:
    return rewriter.scan(MODELS / CASES[name]["file"], inputs=MODELS / CASES[name]["inputs"])


def kinds(result: ScanResult, severity: str) -> set[str]:
    return {f.kind for f in result.findings if f.severity == severity}


def test_an_epsilon_that_no_output_shows_is_no_error() -> None:
    """Log reads 0 in FP16, and the floor of a log spectrogram hides its -inf."""
    floored = graph(
        "g (float[1,8] x) => (float[1,8] y) <float e = {1e-10}, float floor = {-5.0}> "
        "{ d = Max(x, e) l = Log(d) y = Max(l, floor) }"
    )
    result = rewriter.scan(floored.whole(), inputs={"x": np.arange(8, dtype=np.float32)[None]})
    assert result.plain is not None and result.plain.passed
    assert result.plain.summary.startswith("FP16 emulated: largest error ")
    assert "epsilon" in kinds(result, "warning") and not kinds(result, "error")


class TestCases:
    @pytest.mark.parametrize("name", small(CASES))
    def test_errors_stand_where_naive_fp16_fails_and_nowhere_else(self, name: str) -> None:
        wrong = CASES[name]["naive_fp16"] in {"garbage", "nan"} and name != MIXED
        assert bool(kinds(scanned(name), "error")) == wrong

    def test_what_a_mixed_model_keeps_in_fp32_is_a_note_that_says_so(self) -> None:
        norms = [f for f in scanned(MIXED).findings if f.kind == "unfused-norm"]
        assert {(f.severity, f.repair) for f in norms} == {("note", ALREADY_AVOIDED)}
        assert len(norms) == 2

    @pytest.mark.parametrize("name", small(BEHAVED))
    def test_a_model_that_behaves_gets_no_warning(self, name: str) -> None:
        assert {f.kind for f in scanned(name).findings if f.severity != "note"} == set()

    @pytest.mark.parametrize(
        "name", small(n for n, c in CASES.items() if c.get("layer_norms") and c["opset"] < 17)
    )
    def test_every_decomposed_norm_is_found(self, name: str) -> None:
        case = CASES[name]
        norms = [f for f in scanned(name).findings if f.kind == "unfused-norm"]
        others = case.get("rms_norms", 0) + case.get("channel_layer_norms", 0) + case.get("l2_norms", 0)
        assert len(norms) == case["layer_norms"] + others

    def test_coordinates_and_order_of_a_detector_are_warnings(self) -> None:
        assert kinds(scanned("rtdetr"), "warning") == {"coordinates", "order"}

    def test_a_mask_is_found_without_padding_in_the_data(self) -> None:
        with np.load(MODELS / CASES[BERT]["inputs"]) as archive:
            feeds = {k: np.ones_like(v) if "mask" in k else v for k, v in archive.items()}
        result = rewriter.scan(MODELS / CASES[BERT]["file"], inputs=feeds)
        assert kinds(result, "error") == {"mask"}

    def test_a_defect_is_certain_with_the_release_that_has_it(self) -> None:
        path, data = (MODELS / CASES["matmul_clip"][key] for key in ("file", "inputs"))
        assert kinds(rewriter.scan(path, inputs=data, target="10.13"), "error") == {"known-defect"}
        assert not rewriter.scan(path, inputs=data, target="10.15").findings


LARGE = graph("g (float[2,4] x) => (float[2,4] y) <float k = {1e5}> { a = Mul(x, k)\n y = Neg(a) }")
CLIPPED = graph("""
    g (float[2,4] x) => (float[2,4] y) <float k = {1e5}, float one = {1.0}> {
        a = Mul(x, k) y = Clip(a, one) }""")
FEEDS = {"x": np.ones((2, 4), np.float32)}


def mixed(body: str, value: float) -> ScanResult:
    """A scan of `body`, which reads x and the FP16 h, in a model that computes in FP16 before it."""
    text = f"g (float[2,4] x) => (float[2,4] y) {{ g = Cast<to = 10>(x)\n h = Neg(g)\n {body} }}"
    return rewriter.scan(graph(text).proto, inputs={"x": np.full((2, 4), value, np.float32)})


def errors(body: str, value: float) -> set[str]:
    return kinds(mixed(body, value), "error")


class TestMixedModels:
    ISLAND = "w = Cast<to = 1>(h) a = Mul(w, w) "

    def test_fp32_holds_what_fp16_would_not(self) -> None:
        assert not errors(self.ISLAND + "y = Sqrt(a)", 1000.0)

    def test_the_same_in_fp16_overflows(self) -> None:
        assert errors("a = Mul(h, h) b = Sqrt(a) y = Cast<to = 1>(b)", 1000.0) == {"overflow"}

    def test_a_cast_behind_the_island_loses_what_it_saved(self) -> None:
        body = self.ISLAND + "b = Cast<to = 10>(a) c = Sqrt(b) y = Cast<to = 1>(c)"
        assert errors(body, 1000.0) == {"overflow"}
        assert not errors(body, 100.0)

    @pytest.mark.parametrize(("read", "kept"), [("x", True), ("w", False)])
    def test_fp32_restores_no_order_that_was_rounded_before(self, read: str, kept: bool) -> None:
        body = f"w = Cast<to = 1>(h) i = ArgMax<axis = 1>({read}) f = Cast<to = 1>(i) y = Add(w, f)"
        (order,) = (f for f in mixed(body, 1.0).findings if f.kind == "order")
        assert (order.repair == ALREADY_AVOIDED) == kept


class TestResult:
    def test_findings_come_worst_first(self) -> None:
        order = [SEVERITIES.index(f.severity) for f in scanned("t5_encoder").findings]
        assert order == sorted(order, reverse=True) and len(set(order)) > 1

    def test_a_finding_names_nodes_evidence_and_repair(self) -> None:
        (finding,) = (f for f in rewriter.scan(LARGE.proto, inputs=FEEDS).findings if f.kind == "overflow")
        assert (finding.severity, finding.tensor, finding.ops) == ("error", "a", ("Mul", "Neg"))
        assert finding.range is not None and finding.range.high == 1e5
        assert "FP32" in finding.repair

    def test_bf16_holds_what_fp16_does_not(self) -> None:
        assert not rewriter.scan(LARGE.proto, inputs=FEEDS, precision="bf16").findings

    def test_random_data_is_named_and_supports_no_error(self) -> None:
        result = rewriter.scan(LARGE.proto)
        assert "random-data" in kinds(result, "note")
        assert "overflow" in kinds(result, "warning")
        assert kinds(result, "error") == {"weights"}  # a constant is what it is on any data

    def test_a_local_function_is_looked_into(self) -> None:
        source = model("""
            <ir_version: 8, opset_import: ["" : 17, "own" : 1]>
            g (float[2,4] x) => (float[2,4] y) { y = own.grow(x) }
            <opset_import: ["" : 17], domain: "own">
            grow (v) => (w) { s = Mul(v, v)\n w = Mul(s, s) }""")
        feeds = {"x": np.full((2, 4), 100.0, np.float32)}
        assert "overflow" in kinds(rewriter.scan(source.proto, inputs=feeds), "error")


def printed(result: ScanResult, verbosity: int = 0) -> str:
    stream = io.StringIO()
    out = terminal.console(stream)
    out.width = 80
    scan_report.print_result(result, out, verbosity=verbosity)
    return stream.getvalue()


class TestReports:
    def test_the_table_goes_by_severity_and_fits_into_80_columns(self) -> None:
        text = printed(rewriter.scan(CLIPPED.proto, inputs=FEEDS))
        assert text.index("Errors") < text.index("Notes")
        assert max(map(len, text.splitlines()[1:])) <= 80
        assert "https://github.com/NVIDIA/TensorRT/issues/4773" in text.replace("\n", "").replace(" ", "")

    def test_the_first_line_counts(self) -> None:
        line = printed(scanned("bert")).splitlines()[0]
        assert "bert.onnx in FP16: 1 error, 0 warnings, 8 notes" in line
        assert printed(scanned("bert"), -1) == line + "\n"

    def test_many_findings_are_cut_unless_asked_for(self) -> None:
        many = [
            Finding("weights", "error", f"{i} things in w{i} of this", "x", (f"n{i}",), ("Add",))
            for i in range(9)
        ]
        result = replace(scanned("resnet"), findings=tuple(many))
        assert "weights, 9 times: 0 things in w0 of this: n0, n1, ... and 7 more" in flat(printed(result))
        assert "w8" in printed(result, 1) and "w8" not in printed(result)
        kinds = tuple(replace(f, repair=f"repair {i}") for i, f in enumerate(many))
        text = flat(printed(replace(result, findings=kinds)))
        assert "... and 4 kinds more: -v shows all" in text and "Next rewriter fix" in text

    def test_json_holds_everything(self, tmp_path: Path) -> None:
        path = tmp_path / "scan.json"
        write_json(scan_report.as_dict(scanned("t5_encoder")), path)
        written = json.loads(path.read_text())
        assert written["counts"] == {"error": 5, "warning": 1, "note": scanned("t5_encoder").count("note")}
        assert written["findings"][0]["range"]["high"] > 1000


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["scan", *map(str, arguments)])


class TestCommand:
    @values
    def test_exit_codes(self, tmp_path: Path, arguments: tuple[str, ...], code: int) -> None:
        path = save(LARGE, tmp_path / "model.onnx")
        if "--input-shapes" not in arguments:
            np.savez(tmp_path / "data.npz", **FEEDS)  # type: ignore[arg-type]
            arguments = (*arguments, "--inputs", str(tmp_path / "data.npz"))
        done = command(path, *arguments)
        assert done.exit_code == code, done.output
        assert done.stderr.startswith("error: ") == (code == 2)

    def test_files_are_written_and_the_model_is_not(self, tmp_path: Path) -> None:
        path = save(LARGE, tmp_path / "model.onnx")
        before = path.read_bytes()
        done = command(path, "--json", tmp_path / "a.json", "--sarif", tmp_path / "b.sarif", "-q")
        assert done.exit_code == 0 and done.stdout.count("\n") == 1
        assert json.loads((tmp_path / "a.json").read_text())["input"] == str(path)
        assert json.loads((tmp_path / "b.sarif").read_text())["version"] == "2.1.0"
        assert path.read_bytes() == before
