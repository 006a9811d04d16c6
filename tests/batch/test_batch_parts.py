"""Parts of a batch on their own: what is packed, hashed, passed on and moved, and what is refused."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import graph, with_weights
from tables import values

from rewriter.base.errors import UsageError
from rewriter.batch import models
from rewriter.batch.cluster import Cluster, pack, run_task, unpack
from rewriter.batch.models import Entry, key_of, model_files
from rewriter.ir.model import save
from rewriter.pipeline.config import Configuration


def test_a_model_is_packed_with_its_weights(tmp_path: Path) -> None:
    weights = {"w": np.ones((64, 64), np.float32)}
    model = with_weights("g (float[2,64] x, float[64,64] w) => (float[2,64] y) { y = MatMul(x, w) }", weights)
    path = tmp_path / "net.onnx"
    onnx.save(model.whole(), path, save_as_external_data=True, location="net.data", size_threshold=0)
    (tmp_path / "other.txt").write_text("not of the model")
    packed = pack(path.parent, model_files(path))
    assert sorted(packed) == ["net.data", "net.onnx"]
    unpack(packed, tmp_path / "there" / "deep")
    assert {file.name: file.read_bytes() for file in (tmp_path / "there" / "deep").iterdir()} == dict(packed)


def test_a_folder_is_packed_with_its_name_and_all_below(tmp_path: Path) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "a.npz").write_bytes(b"a")
    (tmp_path / "data" / "b.npz").write_bytes(b"b")
    packed = pack(tmp_path, [tmp_path / "data"])
    assert packed == {"data/deep/a.npz": b"a", "data/b.npz": b"b"}
    assert pack(tmp_path / "data", [tmp_path / "data" / "b.npz"]) == {"b.npz": b"b"}
    unpack(packed, tmp_path / "there")
    assert pack(tmp_path / "there", [tmp_path / "there" / "data"]) == packed


def test_a_key_follows_contents_and_options_and_not_names(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.npz", "b.npz", "c.npz")]
    for path, content in zip(paths, (b"1", b"1", b"2"), strict=True):
        path.write_bytes(content)
    model = save(graph("g (float[2] x) => (float[2] y) { y = Exp(x) }"), tmp_path / "net.onnx")

    def key(**options: Any) -> str:
        return key_of(Entry("net.onnx", model, tmp_path / "out.onnx", options))

    assert key(inputs=paths[0]) == key(inputs=paths[1]) != key(inputs=paths[2])
    assert key(plugin_libs=tuple(paths[:2])) != key(plugin_libs=tuple(paths[:1])) != key()
    assert key(opset=18) != key(opset=17)
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder, name in zip(folders, ("x.npz", "x.npz", "y.npz"), strict=True):
        folder.mkdir()
        (folder / name).write_bytes(b"a")
    assert key(inputs=folders[0]) == key(inputs=folders[1]) != key(inputs=folders[2]), (
        "names in a folder count"
    )
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    assert key_of(Entry("broken.onnx", broken, tmp_path / "out.onnx", {})) != key()


@values
def test_a_manifest_that_makes_no_sense_is_refused(text: str, words: str, tmp_path: Path) -> None:
    save(graph("g (float[2] x) => (float[2] y) { y = Exp(x) }"), tmp_path / "net.onnx")
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        models.listed(path, tmp_path / "out")
    assert str(caught.value).startswith(str(path)) and caught.value.hint


def test_options_of_one_model_go_over_those_of_all(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(graph("g (float[2] x) => (float[2] y) { y = Exp(x) }"), tmp_path / f"{name}.onnx")
    path = tmp_path / "models.toml"
    path.write_text("opset = 17\n[[model]]\npath = 'a.onnx'\nopset = 18\n[[model]]\npath = 'b.onnx'")
    a, b = models.listed(path, tmp_path / "out")
    assert (a.options["opset"], b.options["opset"]) == (18, 17)


def test_a_batch_of_nothing_and_one_over_its_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no models are named"):
        models.entries([], tmp_path / "out", {}, Configuration(()))
    model = save(graph("g (float[2] x) => (float[2] y) { y = Exp(x) }"), tmp_path / "net.onnx")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "net.onnx").symlink_to(model)
    with pytest.raises(UsageError, match="would replace the model"):
        models.entries([model], linked, {}, Configuration(()))
    (tmp_path / "net.npz").write_bytes(b"")
    (entry,) = models.entries([model], tmp_path / "out", {}, Configuration(()))
    assert (entry.output, entry.options["inputs"]) == (tmp_path / "out" / "net.onnx", tmp_path / "net.npz")
    (shaped,) = models.entries([model], tmp_path / "out", {"input_shapes": {"x": (2,)}}, Configuration(()))
    assert "inputs" not in shaped.options, "the user gave shapes for random data"


class Ray:
    """Runs a task where it is submitted: what travels to a worker and back is as on a cluster."""

    exceptions = SimpleNamespace(RayError=ConnectionError)

    def init(self, **_: object) -> None:
        """It is there."""

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0, "memory": 4e9}}]

    def put(self, value: Any) -> Any:
        return value

    def remote(self, task: Any) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=partial(partial, task)))

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references[:1], references[1:]

    def get(self, reference: Any) -> Any:
        if reference.args[0].name == "lost.onnx":
            raise ConnectionError("the worker died")
        return reference()


def test_a_cluster_gets_all_and_sends_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(graph("g (float[2] x) => (float[2] y) { y = Exp(x) }"), tmp_path / "net.onnx")
    np.savez(tmp_path / "x.npz", x=np.ones(2, np.float32))
    options = {"inputs": tmp_path / "x.npz", "build": False}
    entries = [Entry(name, model, tmp_path / "out" / name, options) for name in ("net.onnx", "lost.onnx")]
    monkeypatch.setitem(sys.modules, "ray", Ray())
    cluster = Cluster("auto", gpus=0.0, jobs=0, seconds=60.0)
    cluster.start(entries)
    ends = {end[0].name: end[1] for end in cluster.ends if end is not None}
    assert ends["net.onnx"].ending == "unproven" and ends["net.onnx"].files == ("net.onnx",)
    assert (tmp_path / "out" / "net.onnx").is_file()
    assert ends["lost.onnx"].text == "Ray ran it 6 times: the worker died"
    assert run_task(entries[0], 60.0, "another version", [])[0].ending == "refused"
