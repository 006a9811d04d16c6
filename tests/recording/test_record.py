"""A script is recorded as it is: samples, links, states; what it prints and returns does not change."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import graph
from onnx import TensorProto, helper, numpy_helper
from paths import ROOT
from streaming import streaming_script
from typer.testing import CliRunner

import rewriter
from rewriter.base.errors import OutputError, UsageError
from rewriter.batch.models import Entry, entries
from rewriter.cli import app
from rewriter.hooks.fixing import FixWarning
from rewriter.hooks.optimum import fix_export
from rewriter.ir.model import Model, load, save
from rewriter.jobs.record import record_script
from rewriter.pipeline import config
from rewriter.report import deploy
from rewriter.runtime.inputs import load_samples, read_raw_samples
from rewriter.runtime.inputs.random_samples import cache_pairs
from rewriter.runtime.recording.record import Recording


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    return streaming_script(tmp_path)


def links_of(recording: Recording) -> set[tuple[str, str, str, str, int | None]]:
    return {(link.producer, link.output, link.consumer, link.input, link.axis) for link in recording.links}


def test_a_script_is_recorded_unchanged(command: list[str], tmp_path: Path) -> None:
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    result = CliRunner().invoke(app, ["record", str(tmp_path / "samples"), "--", *command])
    recording = Recording.read(tmp_path / "samples")
    assert (result.exit_code, recording.exit_code) == (5, 5)
    assert result.stdout == recording.printed == plain.stdout
    assert recording.command == tuple(command)
    assert recording.versions["numpy"] == np.__version__
    assert {file.name: file.calls for file in recording.files} == {"model": 40, "bytes-1": 43}
    assert recording.calls[:4] == (("model", 0), ("bytes-1", 0), ("bytes-1", 1), ("model", 1))


def test_links_are_found_and_none_is_false(command: list[str], tmp_path: Path) -> None:
    recording = record_script(tmp_path / "samples", command)
    assert links_of(recording) == {
        ("model", "new_mean", "model", "mean", None),
        ("model", "new_fast", "model", "fast", None),
        ("model", "y", "bytes-1", "y", None),
        ("bytes-1", "new_cache", "bytes-1", "cache", 1),
    }
    steps = {state.output: state.step for state in recording.states}
    assert steps["new_cache"] is None
    assert 0 < (steps["new_mean"] or 0) < 16 < (steps["new_fast"] or 0)


def test_samples_are_thinned_and_shapes_are_of_all_calls(command: list[str], tmp_path: Path) -> None:
    recording = record_script(tmp_path / "samples", [*command[:-1], "130"])
    file = recording.file("bytes-1")
    numbers = [int(path.stem) for path in sorted((tmp_path / "samples" / file.samples).glob("*.npz"))]
    assert {0, 1, 3, 7, 15, 31, 63, 127, 132} <= set(numbers)
    assert len(numbers) <= 24
    assert file.shapes["cache"][::2] == ((1, 0, 4), (1, 129, 4))
    assert (tmp_path / "samples" / file.model).is_file()
    last = read_raw_samples(tmp_path / "samples" / file.samples)[-1].read()
    assert last["cache"].shape == (1, 129, 4)


def test_a_recording_ends_after_so_many_calls_and_within_its_disk(command: list[str], tmp_path: Path) -> None:
    recording = record_script(tmp_path / "samples", command, calls=7, disk_gib=100 / 2**30)
    assert (len(recording.calls), recording.exit_code) == (7, 0)
    assert "the limit on disk was reached" in recording.notes[0]
    assert sum(1 for _ in (tmp_path / "samples").rglob("*.npz")) < 4


def test_python_code_records_itself(command: list[str], tmp_path: Path) -> None:
    import onnxruntime as ort

    session = ort.InferenceSession(Path(command[2]) / "encoder" / "model.onnx")
    data = np.random.default_rng(0)
    x: dict[str, Any] = {
        name: data.standard_normal((1, 4)).astype(np.float32) for name in ("x", "mean", "fast")
    }
    with rewriter.record(tmp_path / "samples"):
        for _ in range(3):
            _, x["mean"], x["fast"] = session.run(None, x | {"x": x["x"].tolist()})
    (first, *_) = read_raw_samples(tmp_path / "samples" / "model")
    assert first.read()["x"].tolist() == x["x"].tolist()
    assert len(links_of(Recording.read(tmp_path / "samples"))) == 2
    with pytest.raises(UsageError, match="no model was called"), rewriter.record(tmp_path / "none"):
        pass
    assert not (tmp_path / "none").exists()


def test_of_equal_outputs_each_may_be_the_state(tmp_path: Path) -> None:
    """The sequence of one step equals the state, and the script passes on the second: both get its type."""
    import onnxruntime as ort

    text = "g (float[1,4] x, float[1,4] h) => (float[1,4] y, float[1,4] new)"
    text += "{ s = Add(x, h) y = Tanh(s) new = Tanh(s) }"
    session = ort.InferenceSession(save(graph(text), tmp_path / "model.onnx"))
    feeds = {name: np.random.default_rng(0).random((1, 4), np.float32) for name in "xh"}
    with rewriter.record(tmp_path / "calls"):
        for _ in range(3):
            feeds["h"] = np.asarray(session.run(None, feeds)[1])
    assert {link.output for link in Recording.read(tmp_path / "calls").links} == {"y", "new"}
    options = {"io": "links=fp16", "build": False}
    (entry,) = entries([tmp_path / "calls"], tmp_path / "out", options, config.load())
    assert set(entry.options["io"].split(",")) == {"h=fp16", "new=fp16", "y=fp16"}


def test_what_cannot_be_recorded_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="C\\+\\+") as error:
        record_script(tmp_path / "samples", [sys.executable, "-c", "print(1)"])
    assert "onnxruntime-genai" in str(error.value)
    with pytest.raises(UsageError, match="other files"):
        record_script(ROOT, [sys.executable, "-c", ""])
    (file := tmp_path / "file").touch()
    with pytest.raises(OutputError, match="no folder can be made there"):
        record_script(file / "samples", [sys.executable, "-c", "pass"])
    with pytest.raises(UsageError, match="cannot be started"):
        record_script(tmp_path / "samples", ["no-such-command"])


FULL = """
import os, resource, sys
import numpy as np
import onnxruntime as ort
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
session = ort.InferenceSession(sys.argv[1])
y, at = np.ones((1, 4), np.float32), np.zeros(1, np.int64)
for length in (1, 4000, 4000, 4000):
    session.run(None, {"y": y, "cache": np.ones((1, length, 4), np.float32), "at": at})
print("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it has no limits of files")
def test_a_script_goes_on_where_the_disk_is_full(command: list[str], tmp_path: Path) -> None:
    (script := tmp_path / "full.py").write_text(FULL)
    model = Path(command[2]) / "decoder.onnx"
    recording = record_script(tmp_path / "s", [sys.executable, str(script), str(model), "30000"])
    assert (recording.printed, recording.exit_code, len(recording.calls)) == ("done\n", 0, 4)
    assert recording.notes[0].startswith("later calls were not kept as samples: ")
    assert [len(sample.read()["cache"][0]) for sample in read_raw_samples(tmp_path / "s" / "decoder")] == [1]


POOL = """
import os
import sys
from multiprocessing import get_context
from multiprocessing.util import Finalize

import numpy as np
import onnxruntime as ort


def call(number):
    if number == 5:  # another signal while it ends
        Finalize(None, os.kill, (os.getpid(), 15), exitpriority=9)
    session = ort.InferenceSession(sys.argv[1])
    inputs = {one.name: np.full((1, 4), number, np.float32) for one in session.get_inputs()}
    return float(session.run(None, inputs)[0].sum())


if __name__ == "__main__":
    with get_context(sys.argv[2]).Pool(1) as pool:
        print(pool.map(call, range(6), chunksize=1))
"""


@pytest.mark.parametrize("calls", [0, 3], ids=["to its end", "three calls"])
@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_processes_of_a_pool_are_recorded(command: list[str], tmp_path: Path, start: str, calls: int) -> None:
    """They end by a signal or without `atexit`, and a pool would wait forever for one that is gone."""
    (script := tmp_path / "pool.py").write_text(POOL)
    model = Path(command[2]) / "encoder" / "model.onnx"
    recording = record_script(tmp_path / "s", [sys.executable, str(script), str(model), start], calls=calls)
    assert (len(recording.calls), recording.exit_code) == (calls or 6, 0)
    assert {path.name for path in (tmp_path / "s").iterdir()} == {"model", "record.json"}
    samples = read_raw_samples(tmp_path / "s" / "model")
    assert [float(sample.read()["x"][0, 0]) for sample in samples[:3]] == [0.0, 1.0, 2.0]


def test_pytest_and_libraries_without_a_version_are_recorded(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "diffusers").mkdir()  # a package without a file has no version
    test = f"import diffusers, runpy, sys\n\ndef test_it():\n    sys.argv = {command[1:]!r}\n"
    text = f"    try:\n        runpy.run_path({command[1]!r})\n    except SystemExit:\n        pass\n"
    (tmp_path / "test_script.py").write_text(test + text)
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_script.py")]
    recording = record_script(tmp_path / "samples", run)
    assert (recording.exit_code, len(recording.calls)) == (0, 83)
    assert recording.versions["diffusers"] == "unknown"


@pytest.fixture
def decoder() -> Model:
    f, i = TensorProto.FLOAT, TensorProto.INT64
    total = "past_sequence_length + sequence_length"
    inputs = [
        helper.make_tensor_value_info("input_ids", i, ["batch_size", "sequence_length"]),
        helper.make_tensor_value_info("attention_mask", f, ["batch_size", total]),
        helper.make_tensor_value_info("position_ids", i, ["batch_size", "sequence_length"]),
        helper.make_tensor_value_info(
            "past_key_values.0.key", f, ["batch_size", 2, "past_sequence_length", 4]
        ),
    ]
    outputs = [
        helper.make_tensor_value_info("logits", f, ["batch_size", 2, "sequence_length", total]),
        helper.make_tensor_value_info("present.0.key", f, ["batch_size", 2, total, 4]),
    ]
    random = np.random.default_rng(0)
    weights = {
        "words": random.standard_normal((300, 8)).astype(np.float32),
        "places": random.standard_normal((100, 8)).astype(np.float32),
        "split": np.array([0, 0, 2, 4]),
        "axes": np.array([1, 2]),
    }
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["word"]),
        helper.make_node("Gather", ["places", "position_ids"], ["place"]),
        helper.make_node("Add", ["word", "place"], ["x"]),
        helper.make_node("Reshape", ["x", "split"], ["heads"]),
        helper.make_node("Transpose", ["heads"], ["new"], perm=[0, 2, 1, 3]),
        helper.make_node("Concat", ["past_key_values.0.key", "new"], ["present.0.key"], axis=2),
        helper.make_node("Transpose", ["present.0.key"], ["turned"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["new", "turned"], ["scores"]),
        helper.make_node("Unsqueeze", ["attention_mask", "axes"], ["mask"]),
        helper.make_node("Mul", ["scores", "mask"], ["logits"]),
    ]
    held = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    body = helper.make_graph(nodes, "g", inputs, outputs, held)
    return load(helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


def test_lengths_masks_and_positions_agree(decoder: Model) -> None:
    samples = load_samples(None, decoder)
    (feeds,) = samples
    past, tokens = feeds["past_key_values.0.key"].shape[2], feeds["input_ids"].shape[1]
    assert past > 1
    assert feeds["attention_mask"].shape == (1, past + tokens)
    assert feeds["position_ids"].tolist() == [[*range(past, past + tokens)]]
    assert "rewriter record" in samples.source.text


def test_a_decoder_is_fixed_without_data(decoder: Model) -> None:
    result = rewriter.fix(decoder, build=False)
    assert result.verdict is not None and result.verdict.passed


def test_caches_are_paired_by_their_names(decoder: Model) -> None:
    model = rewriter.fix(decoder, io="links=fp16,logits=fp32", build=False).model
    types = {port.name: port.dtype for port in (*model.signature.inputs, *model.signature.outputs)}
    assert types["past_key_values.0.key"] == types["present.0.key"] == TensorProto.FLOAT16
    assert types["logits"] == types["attention_mask"] == TensorProto.FLOAT


def test_positions_stay_within_their_table(decoder: Model) -> None:
    (feeds,) = load_samples(None, decoder, input_shapes={"past_key_values.0.key": (1, 2, 90, 4)})
    assert feeds["position_ids"].max() == 99
    assert feeds["attention_mask"].shape[1] == 90 + feeds["input_ids"].shape[1]


def test_names_of_genai_pair_caches(decoder: Model, tmp_path: Path) -> None:
    assert cache_pairs(decoder) == {"past_key_values.0.key": "present.0.key"}
    save(decoder, tmp_path / "model.onnx")
    proto = onnx.load(tmp_path / "model.onnx")
    for value, name in ((proto.graph.input[3], "kv_in_0"), (proto.graph.output[1], "kv_out_0")):
        old, value.name = value.name, name
        for node in proto.graph.node:
            for tensors in (node.input, node.output):
                tensors[:] = [name if other == old else other for other in tensors]
    onnx.save(proto, tmp_path / "model.onnx")
    assert cache_pairs(load(tmp_path / "model.onnx")) == {}
    roles = {"inputs": {"past_key_names": "kv_in_%d"}, "outputs": {"present_key_names": "kv_out_%d"}}
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"decoder": roles}}))
    assert cache_pairs(load(tmp_path / "model.onnx")) == {"kv_in_0": "kv_out_0"}
    (feeds,) = load_samples(None, load(tmp_path / "model.onnx"))
    assert feeds["position_ids"][0, 0] == feeds["kv_in_0"].shape[2]


def test_both_branches_of_a_merged_decoder_are_measured(tmp_path: Path) -> None:
    branch = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy")
    sides = [
        helper.make_graph(
            [helper.make_node(op, ["x"], [op])], op, [], [helper.make_empty_tensor_value_info(op)]
        )
        for op in ("Exp", "Sigmoid")
    ]
    node = helper.make_node("If", ["use_cache_branch"], ["y"], then_branch=sides[0], else_branch=sides[1])
    body = helper.make_graph([node], "g", [x, branch], [y])
    model = load(helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert [feeds["use_cache_branch"].tolist() for feeds in load_samples(None, model)] == [[True], [False]]
    findings = rewriter.scan(model).findings
    assert [f for f in findings if f.kind == "unmeasured"] == []


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
