"""Models: files round-trip, weights are mapped and not read, and failures leave no trace."""

import os
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnx_graphsurgeon
import pytest
from graphs import graph, model, random_feeds, run
from onnx import TensorProto, helper, numpy_helper
from paths import ROOT
from tables import values

from rewriter.base.errors import ModelError, OutputError
from rewriter.ir.model import DETACH_BYTES, Array, Model, load, replace_items, save
from rewriter.ir.model.graphs import UNKNOWN_DOMAIN

COMMITTED = [pytest.param(path, id=path.stem) for path in sorted((ROOT / "models").glob("*.onnx"))]


def _with_weight(weight: onnx.TensorProto) -> onnx.ModelProto:
    """y = Identity(w), with an opset that knows every type."""
    made = helper.make_graph(
        [helper.make_node("Identity", [weight.name], ["y"])],
        "g",
        [],
        [helper.make_tensor_value_info("y", weight.data_type, list(weight.dims))],
        [weight],
    )
    return helper.make_model(made, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def _float_weight(count: int = 1024) -> onnx.ModelProto:
    return _with_weight(numpy_helper.from_array(np.arange(count, dtype=np.float32), "w"))


def _external(folder: Path, name: str = "m.onnx", location: str = "m.weights", count: int = 1024) -> Path:
    path = folder / name
    onnx.save(_float_weight(count), path, save_as_external_data=True, location=location, size_threshold=0)
    return path


class TestRoundTrips:
    @pytest.mark.parametrize("path", COMMITTED)
    def test_a_plain_file_round_trips_byte_for_byte(self, path: Path, tmp_path: Path) -> None:
        saved = save(load(path), tmp_path / path.name)
        assert saved.read_bytes() == path.read_bytes()
        assert [p.name for p in tmp_path.iterdir()] == [path.name]

    def test_a_proto_is_copied_and_returned_whole(self) -> None:
        proto = _float_weight()
        before = proto.SerializeToString()
        source = load(proto)
        assert source.weights["w"].nbytes == 4096 and not source.weights["w"].flags.writeable
        assert source.proto.ByteSize() < 300
        assert source.size > 4096
        assert source.whole().SerializeToString() == before
        assert proto.SerializeToString() == before
        assert not load(_float_weight(DETACH_BYTES // 4 - 1)).weights, "small constants stay in the graph"

    def test_a_graphsurgeon_graph_round_trips(self) -> None:
        source = load(onnx_graphsurgeon.import_onnx(_float_weight()))
        np.testing.assert_array_equal(run(source, {})[0], np.arange(1024, dtype=np.float32))

    TYPES = ("BFLOAT16", "FLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2", "INT4", "UINT4", "INT8", "BOOL", "DOUBLE")

    @pytest.mark.parametrize("name", TYPES)
    @pytest.mark.parametrize("external", [False, True], ids=["inside", "external"])
    def test_every_element_type_round_trips(self, name: str, external: bool, tmp_path: Path) -> None:
        dtype = helper.tensor_dtype_to_np_dtype(getattr(TensorProto, name))
        values = (np.arange(4097) % 7).astype(dtype)
        proto = _with_weight(numpy_helper.from_array(values, "w"))
        path = tmp_path / "m.onnx"
        onnx.save(proto, path, save_as_external_data=external, location="m.data", size_threshold=0)
        source = load(path)
        saved = save(source, tmp_path / "saved.onnx")
        again = onnx.load(saved)
        np.testing.assert_array_equal(
            numpy_helper.to_array(again.graph.initializer[0]).astype(np.float32), values.astype(np.float32)
        )
        np.testing.assert_array_equal(
            source.array(source.proto.graph.initializer[0]).astype(np.float32), values.astype(np.float32)
        )

    @pytest.mark.parametrize("external", [False, True], ids=["inside", "external"])
    def test_weights_without_elements_round_trip(self, external: bool, tmp_path: Path) -> None:
        path = tmp_path / "m.onnx"
        proto = _with_weight(numpy_helper.from_array(np.zeros((0, 1024), np.float32), "w"))
        onnx.save(proto, path, save_as_external_data=external, location="m.data", size_threshold=0)
        saved = load(save(load(path), tmp_path / "saved.onnx"))
        assert run(saved, {})[0].shape == (0, 1024)

    def test_initializers_listed_as_inputs_stay_and_are_none_of_the_signature(self, tmp_path: Path) -> None:
        proto = model(
            """
            <ir_version: 3, opset_import: ["" : 8]>
            g (float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 2}> { y = Add(x, w) }"""
        ).whole()
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array([1, 2], np.float32), "w"))
        source = load(proto)
        assert [port.name for port in source.signature.inputs] == ["x"]
        again = load(save(source, tmp_path / "m.onnx"))
        assert [v.name for v in again.proto.graph.input] == ["x", "w"]

    def test_a_detached_initializer_may_be_an_input_too(self) -> None:
        proto = _float_weight()
        proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [1024]))
        source = load(proto)
        assert source.weights
        assert source.signature.inputs == ()
        assert source.whole().SerializeToString() == proto.SerializeToString()


class TestUnknownOperators:
    TEXT = "g (float[2] x) => (float[2] y) { a = TheirPlugin<alpha = 0.5>(x) y = Relu(a) }"

    def test_an_operator_without_schema_loads_and_is_kept(self, tmp_path: Path) -> None:
        source = graph(self.TEXT)
        again = load(save(source, tmp_path / "m.onnx"))
        assert [(n.domain, n.op_type) for n in again.proto.graph.node] == [("", "TheirPlugin"), ("", "Relu")]
        assert [o.domain for o in again.proto.opset_import] == [""]

    def test_sparse_tensors_are_written_out(self) -> None:
        values = helper.make_tensor("w", onnx.TensorProto.FLOAT, [2], [5.0, 7.0])
        linear = helper.make_tensor("i", onnx.TensorProto.INT64, [2], [1, 5])
        pairs = helper.make_tensor("i", onnx.TensorProto.INT64, [2, 2], [0, 1, 1, 2])
        text = "g (float[2, 3] x) => (float[2, 3] y) { k = Relu (x) a = Add (x, w) y = Add (a, k) }"
        proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
        held = helper.make_sparse_tensor(values, pairs, [2, 3])
        proto.graph.node[0].CopyFrom(helper.make_node("Constant", [], ["k"], sparse_value=held))
        proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, linear, [2, 3]))
        result = load(proto).whole()
        assert not result.graph.sparse_initializer
        dense = np.array([[0, 5, 0], [0, 0, 7]], np.float32)
        np.testing.assert_array_equal(numpy_helper.to_array(result.graph.initializer[0]), dense)
        np.testing.assert_array_equal(numpy_helper.to_array(result.graph.node[0].attribute[0].t), dense)
        proto.graph.sparse_initializer[0].indices.int64_data[1] = 6
        with pytest.raises(ModelError, match=r"sparse tensor 'w': its values and indices make no tensor"):
            load(proto)
        proto.graph.sparse_initializer[0].dims[:] = [2**20, 2**20]
        with pytest.raises(ModelError, match="it would have 4398046511104 bytes, more than a file can hold"):
            load(proto)

    def test_a_weightless_model_that_a_library_changed_gets_its_weights_back(self) -> None:
        source = load(_float_weight())
        source.proto.graph.node.append(helper.make_node("TheirPlugin", ["y"], ["z"]))
        loose = source.weightless()
        assert not loose.graph.initializer
        assert [v.name for v in loose.graph.input] == ["w"]
        assert [n.domain for n in loose.graph.node] == ["", UNKNOWN_DOMAIN]
        assert source.restore(loose).same_as(source)


class TestExternalData:
    def test_external_data_is_mapped_and_saved_next_to_the_model(self, tmp_path: Path) -> None:
        source = load(_external(tmp_path))
        assert source.external
        assert source.weights["w"].base is not None, "mapped"
        (tmp_path / "out").mkdir()
        saved = save(source, tmp_path / "out" / "fixed.onnx")
        assert {p.name for p in (tmp_path / "out").iterdir()} == {"fixed.onnx", "fixed.onnx.data"}
        onnx.checker.check_model(str(saved))
        np.testing.assert_array_equal(load(saved).weights["w"], np.arange(1024, dtype=np.float32))

    @pytest.mark.parametrize("called", [False, True], ids=["graph", "function"])
    def test_external_tensors_of_branches_and_constants_load(self, called: bool, tmp_path: Path) -> None:
        proto = graph(
            """
            g (float[4] x, bool c) => (float[4] y) {
                y = If (c) <
                    then_branch = t () => (float[4] u) <float[4] w = {1, 2, 3, 4}> { u = Add(x, w) },
                    else_branch = e () => (float[4] v) {
                        k = Constant<value = float[4] {4, 3, 2, 1}>() v = Add(x, k)
                    }
                >
            }"""
        ).whole()
        inner = proto.graph.node[0].attribute[0].g.initializer[0]
        constant = proto.graph.node[0].attribute[1].g.node[0].attribute[0].t
        for offset, tensor in enumerate((constant, inner)):
            values = numpy_helper.to_array(tensor).tobytes()
            (tmp_path / f"{offset}.bin").write_bytes(values)
            _point(tensor, f"{offset}.bin")
        if called:
            body = helper.make_function("own", "F", ["x", "c"], ["y"], proto.graph.node, proto.opset_import)
            proto.graph.node[0].CopyFrom(helper.make_node("F", ["x", "c"], ["y"], domain="own"))
            proto.functions.append(body)
            proto.opset_import.append(helper.make_opsetid("own", 1))
        (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
        source = load(tmp_path / "m.onnx")
        assert not source.weights
        feeds = random_feeds(source)
        for condition, constant_values in ((True, [1, 2, 3, 4]), (False, [4, 3, 2, 1])):
            found = run(source, feeds | {"c": np.array(condition)})[0]
            np.testing.assert_array_equal(found, feeds["x"] + np.array(constant_values, np.float32))

    def test_a_proto_with_external_data_is_refused_without_its_folder(self, tmp_path: Path) -> None:
        proto = onnx.load(_external(tmp_path), load_external_data=False)
        with pytest.raises(ModelError, match="pass the path of the model"):
            load(proto)

    def test_a_model_of_more_than_two_gigabytes_round_trips(self, tmp_path: Path) -> None:
        """A sparse file needs no space on the disk and, mapped, none in memory."""
        count = 2_200_000_000 // 4
        proto = _float_weight(2)
        weight = proto.graph.initializer[0]
        weight.dims[0] = count
        proto.graph.output[0].type.tensor_type.shape.dim[0].dim_value = count
        _point(weight, "big.bin")
        with (tmp_path / "big.bin").open("wb") as stream:
            stream.truncate(count * 4)
        (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
        source = load(tmp_path / "m.onnx")
        assert source.copy().size > 2**31
        assert source.facts(strict=True).main["y"].shape == (count,)
        with pytest.raises(ModelError, match=r"2\.0 GiB do not fit into one protobuf message"):
            source.whole()


def _point(tensor: onnx.TensorProto, location: str) -> None:
    tensor.ClearField("raw_data")
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)


class TestBadFiles:
    @values
    def test_what_is_no_model_is_an_error(self, source: Any, words: str, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=words):
            load(tmp_path / source if isinstance(source, str) else source)

    KINDS = (
        pytest.param("m.onnx", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull", id="Git LFS"),
        pytest.param("m.pt", b"PK\x03\x04", "torch.onnx.export", id="PyTorch"),
        pytest.param("m.tflite", b"\x1c\0\0\0TFL3", "tf2onnx", id="TensorFlow Lite"),
        pytest.param("m.safetensors", b"\x08\0\0\0\0\0\0\0{}", "optimum-cli", id="safetensors"),
        pytest.param("m.engine", b"ftrt", "that it was built from", id="an engine"),
    )

    @pytest.mark.parametrize(("name", "content", "remedy"), KINDS)
    def test_a_file_of_another_kind_is_named_with_its_way_to_onnx(
        self, name: str, content: bytes, remedy: str, tmp_path: Path
    ) -> None:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ModelError, match="not an ONNX model, but ") as caught:
            load(path)
        assert remedy in caught.value.hint

    def test_a_slip_in_the_name_of_a_file_offers_its_neighbour(self, tmp_path: Path) -> None:
        (tmp_path / "encoder.onnx").touch()
        with pytest.raises(ModelError) as caught:
            load(tmp_path / "encodr.onnx")
        assert caught.value.hint == "did you mean 'encoder.onnx'?"

    CONTENTS = (
        pytest.param(b"", id="an empty file"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", id="Git LFS"),
        pytest.param(b"hello\n" * 100, id="text"),
        pytest.param(b"\x89PNG\r\n\x1a\n" + bytes(range(256)), id="a picture"),
        pytest.param(onnx.ModelProto(ir_version=8).SerializeToString(), id="a model without a graph"),
    )

    @pytest.mark.parametrize("content", CONTENTS)
    def test_a_file_that_is_no_model_is_an_error(self, content: bytes, tmp_path: Path) -> None:
        path = tmp_path / "m.onnx"
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"m\.onnx: not an ONNX model"):
            load(path)

    @pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9, 0.999])
    def test_a_truncated_model_is_an_error(self, share: float, tmp_path: Path) -> None:
        content = (ROOT / "models" / "resnet.onnx").read_bytes()
        path = tmp_path / "m.onnx"
        path.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(ModelError, match=r"m\.onnx"):
            load(path)

    def test_the_error_of_an_invalid_graph_names_the_fault(self) -> None:
        proto = _float_weight()
        proto.graph.node[0].input[0] = "nowhere"
        with pytest.raises(ModelError, match=r"the graph is invalid: .*nowhere"):
            load(proto)


class TestFailingToSave:
    def test_saving_into_a_missing_folder_or_over_one_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "m.onnx").mkdir()
        with pytest.raises(OutputError, match=r"m\.onnx: cannot write the model: No such file"):
            save(load(_float_weight()), tmp_path / "nowhere" / "m.onnx")
        with pytest.raises(OutputError, match="cannot write the model"):
            save(load(_float_weight()), tmp_path / "m.onnx")
        (tmp_path / "usual").touch()
        saved = save(load(_float_weight()), tmp_path / "n.onnx")
        assert saved.stat().st_mode == (tmp_path / "usual").stat().st_mode
        assert {p.name for p in tmp_path.iterdir()} == {"m.onnx", "n.onnx", "usual"}

    @pytest.mark.skipif(sys.platform != "linux", reason="/proc has the umask")
    def test_a_new_file_gets_the_usual_mode_and_no_thread_sees_another_umask(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = os.umask(0o027)
        try:
            monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("it is set for all threads"))
            saved = save(load(_float_weight()), tmp_path / "m.onnx")
        finally:
            monkeypatch.undo()
            os.umask(before)
        assert saved.stat().st_mode & 0o777 == 0o640


class TestCopies:
    def test_a_copy_shares_only_arrays(self) -> None:
        source = load(_float_weight())
        other = source.copy()
        assert other.same_as(source)
        assert other.weights["w"] is source.weights["w"]
        other.proto.graph.node[0].op_type = "Neg"
        assert not other.same_as(source)
        assert source.proto.graph.node[0].op_type == "Identity"
        equal = source.copy()
        equal.weights["w"] = source.weights["w"].copy()
        assert not equal.same_as(source), "another array"

    def test_new_tensors_are_detached_by_size_and_type(self) -> None:
        source = load(_float_weight())
        small = source.detached_tensor("small", np.ones(8, np.float32))
        large = source.detached_tensor("large", np.ones((16, 64), ml_dtypes.bfloat16))
        packed = source.detached_tensor("packed", np.ones(4096, ml_dtypes.int4))
        assert source.weights.keys() == {"w", "large"}
        assert (large.data_type, list(large.dims)) == (TensorProto.BFLOAT16, [16, 64])
        for tensor, shape in ((small, (8,)), (large, (16, 64)), (packed, (4096,))):
            array: Array = source.array(tensor)
            assert array.shape == shape
            assert bool(np.all(array.astype(np.float32) == 1))


def test_the_opset_of_a_model_without_one_is_0() -> None:
    assert Model(onnx.ModelProto()).opset == 0
    assert load(_float_weight()).opset == 21


def test_a_field_is_refilled_with_messages_of_its_own_and_others() -> None:
    graph = onnx.parser.parse_graph("g (float[1] x) => (float[1] y) { a = Neg(x) b = Abs(a) y = Exp(b) }")
    other = onnx.helper.make_node("Relu", ["x"], ["a"])
    neg, abs_, exp = graph.node
    replace_items(graph.node, (node for node in (other, exp, abs_)))
    assert [node.op_type for node in graph.node] == ["Relu", "Exp", "Abs"]
    assert neg.op_type == "Neg"
    other.op_type = "Tanh"
    assert graph.node[0].op_type == "Relu"
