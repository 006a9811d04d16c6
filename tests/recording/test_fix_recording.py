"""A recording is what `fix` and `scan` need: samples by file, slow states by name, profiles of all calls."""

import json
from pathlib import Path

import pytest
from onnx import TensorProto
from streaming import streaming_script
from typer.testing import CliRunner

import rewriter
from rewriter.base.errors import UsageError
from rewriter.batch.models import Entry, entries
from rewriter.cli import app
from rewriter.hooks.fixing import FixWarning
from rewriter.hooks.optimum import fix_export
from rewriter.ir.model import Model
from rewriter.jobs.record import record_script
from rewriter.pipeline import config
from rewriter.report import deploy


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streaming")
    record_script(folder / "samples", streaming_script(folder))
    return folder / "samples"


def test_scan_names_the_slow_state_alone(samples: Path) -> None:
    encoder = samples.parent / "models" / "encoder" / "model.onnx"
    found = [f for f in rewriter.scan(encoder, inputs=samples / "model").findings if f.kind == "slow-state"]
    assert [(f.tensor, f.severity) for f in found] == [("new_mean", "warning")]
    assert "state new_mean moves by" in found[0].reason
    assert set(found[0].ops) == {"Mul", "Add"}


def test_fix_keeps_the_slow_state_in_fp32(samples: Path) -> None:
    encoder = samples.parent / "models" / "encoder" / "model.onnx"
    plan = rewriter.fix(encoder, inputs=samples / "model", build=False).plan
    assert plan is not None
    assert {d.tensor for d in plan.decisions if d.rule == "slow-state"} == {"new_mean"}
    assert len(plan.fp32) < plan.float_nodes


def test_growing_axes_get_the_profile_of_the_calls(samples: Path) -> None:
    result = rewriter.fix(samples / "bytes-1" / "model.onnx", inputs=samples / "bytes-1", build=False)
    profile = deploy.Build(result, Path("fixed.onnx")).profile
    assert [profile[key] for key in ("min", "max")] == ["cache:1x0x4", "cache:1x39x4"]
    assert profile["opt"] != profile["max"]


def types_of(model: Model) -> dict[str, int]:
    ports = (*model.signature.inputs, *model.signature.outputs)
    return {port.name: port.dtype for port in ports}


def test_sides_of_a_link_have_one_type_and_a_slow_state_stays_fp32(samples: Path, tmp_path: Path) -> None:
    found = entries([samples], tmp_path, {"io": "links=fp16", "build": False}, config.load())
    low = {
        entry.name: {n for n, kind in types_of(fixed(entry)).items() if kind == TensorProto.FLOAT16}
        for entry in found
    }
    assert low["model.onnx"] >= {"fast", "new_fast"}
    assert not low["model.onnx"] & {"mean", "new_mean", "x"}
    assert ("y" in low["model.onnx"]) == ("y" in low["bytes-1.onnx"])
    assert ("cache" in low["bytes-1.onnx"]) == ("new_cache" in low["bytes-1.onnx"])


def fixed(entry: Entry) -> Model:
    return rewriter.fix(entry.model, verify=False, **entry.options).model


def test_all_files_of_a_recording_are_fixed_on_their_samples(samples: Path, tmp_path: Path) -> None:
    command = ["fix", str(samples), "-o", str(tmp_path / "fixed"), "--no-build", "--report"]
    result = CliRunner().invoke(app, [*command, str(tmp_path / "summary.json")])
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    models, loop = summary["models"], summary["loop"]
    assert (loop["passed"], loop["calls"], loop["fixed"]["calls"]) == (True, 83, 83)
    assert loop["plain"]["error"] > loop["limit"] > loop["fixed"]["error"]
    assert loop["verdict"] in result.output
    assert {model["name"]: model["passed"] for model in models} == {"model.onnx": True, "bytes-1.onnx": True}
    assert (tmp_path / "fixed" / "bytes-1.onnx").is_file()
    assert CliRunner().invoke(app, ["fix", str(samples)]).exit_code == 2
    single = CliRunner().invoke(app, ["fix", str(tmp_path / "fixed" / "bytes-1.onnx"), "--loop-seconds", "5"])
    assert single.exit_code == 2 and "rewriter record" in single.output


SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import onnxruntime as ort
session, data = ort.InferenceSession(Path(__file__).parent / "export" / "used.onnx"), np.random.default_rng(0)
feeds = {name: data.standard_normal((1, 4), np.float32) for name in ("x", "mean", "fast")}
for _ in range(30):
    _, feeds["mean"], feeds["fast"] = session.run(None, feeds)
"""


def test_an_export_is_fixed_on_the_calls_of_a_script(samples: Path, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    for name in ("used", "unused"):
        source = samples.parent / "models" / "encoder" / "model.onnx"
        (tmp_path / "export" / f"{name}.onnx").write_bytes(source.read_bytes())
    (tmp_path / "script.py").write_text(SCRIPT)
    with pytest.warns(FixWarning, match="the script does not call it"):
        unused, used = fix_export(
            tmp_path / "export", tmp_path / "script.py", fix={"build": False}, quiet=True
        )
    assert isinstance(unused.error, UsageError)
    assert used.result is not None and used.result.data is not None
    assert used.result.data.recorded
    assert (tmp_path / "export" / "unused.onnx").read_bytes() == source.read_bytes()
