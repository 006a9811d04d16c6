"""Files of which the checker, protobuf or NumPy would crash: each is an error that names file and node."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import corruption
import numpy as np
import onnx
import pytest
from nightly import sized
from onnx import TensorProto, helper, numpy_helper
from tables import values

from rewriter.base import sandbox
from rewriter.base.errors import ModelError
from rewriter.ir.model import data_files, load


def base() -> onnx.ModelProto:
    """Add of a weight of 2 KiB, Reshape by a small constant, and Softmax."""
    constants = [
        numpy_helper.from_array(np.ones(512, np.float32), "w"),
        numpy_helper.from_array(np.array([2, 512], np.int64), "shape"),
    ]
    nodes = [
        helper.make_node("Add", ["x", "w"], ["a"], "add"),
        helper.make_node("Reshape", ["a", "shape"], ["b"], "reshape"),
        helper.make_node("Softmax", ["b"], ["y"], "softmax", axis=-1),
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 512]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], constants)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)])


def external(folder: Path, **entries: str | None) -> onnx.ModelProto:
    """The model with its weight in `w.bin`; `entries` replace what it says of the place."""
    proto = base()
    weight = proto.graph.initializer[0]
    (folder / "w.bin").write_bytes(weight.raw_data)
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "w.bin", "offset": "0", "length": "2048", **entries}.items():
        if value is not None:
            weight.external_data.add(key=key, value=value)
    return proto


def refused(content: onnx.ModelProto | bytes, folder: Path) -> ModelError:
    """The error of loading the model from a file, which names it and says what to do."""
    path = folder / "m.onnx"
    path.write_bytes(content if isinstance(content, bytes) else content.SerializeToString())
    with pytest.raises(ModelError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert caught.value.hint
    assert len(str(caught.value)) < 1000
    return caught.value


PLACEHOLDER = "NAME"


def put(proto: onnx.ModelProto, place: str, value: object) -> None:
    """Sets a field by its path in the model, such as `graph.node[1].name`."""
    exec(f"proto.{place} = value", {"proto": proto, "value": value})


@values
def test_text_that_is_not_utf8_is_named_with_its_place(place: str, tmp_path: Path) -> None:
    proto = base()
    proto.metadata_props.add(key="k", value="v")
    put(proto, place, PLACEHOLDER)
    content = proto.SerializeToString()
    assert content.count(PLACEHOLDER.encode()) == 1
    error = refused(content.replace(PLACEHOLDER.encode(), b"a\xc0\xafb"), tmp_path)
    assert str(error).startswith(f"{tmp_path / 'm.onnx'}: {place}: it is not UTF-8: a\\xc0\\xafb")


@pytest.mark.parametrize("field", ["doc_string", "producer_name"])
def test_notes_in_another_encoding_stay(field: str, tmp_path: Path) -> None:
    proto = base()
    setattr(proto, field, PLACEHOLDER)
    content = proto.SerializeToString().replace(PLACEHOLDER.encode(), b"f\xfcr!")
    (tmp_path / "m.onnx").write_bytes(content)
    assert load(tmp_path / "m.onnx").whole().SerializeToString() == content


EXTERNAL = [
    pytest.param({"offset": "abc"}, "2048 bytes from byte abc of 'w.bin' on", id="offset is text"),
    pytest.param({"offset": "-4"}, "from byte -4 of", id="negative offset"),
    pytest.param({"offset": "9" * 40}, "from byte 9999", id="huge offset"),
    pytest.param({"offset": "²"}, "from byte ² of", id="offset in another script"),
    pytest.param({"offset": "4"}, "on, which has 2048; its shape [512] needs 2048", id="offset past the end"),
    pytest.param({"length": "x"}, "its data would be x bytes", id="length is text"),
    pytest.param({"length": "8"}, "its data would be 8 bytes", id="short"),
    pytest.param({"location": "a" * 5000}, "is missing", id="location too long"),
    pytest.param({"location": None}, "'' is missing", id="no location"),
    pytest.param({"location": "a\0b"}, "is missing", id="a NUL"),
    pytest.param({"location": "../w.bin"}, "outside the model's folder", id="outside"),
]


@pytest.mark.parametrize(("entries", "words"), EXTERNAL)
def test_an_impossible_external_place(entries: dict[str, str | None], words: str, tmp_path: Path) -> None:
    proto = external(tmp_path, **entries)
    error = refused(proto, tmp_path)
    assert words in str(error)
    assert "initializer 'w'" in str(error)
    files = data_files(tmp_path / "m.onnx")  # asked before it loads
    assert not any(file.resolve().is_dir() for file in files)


def test_keys_of_external_data_that_are_unknown_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(external(tmp_path, colour="red").SerializeToString())
    assert load(path).weights["w"].shape == (512,)


DIMS = "graph.initializer[0].dims[:]"
TYPE = "graph.initializer[0].data_type"
TENSORS: list[tuple[str, Any, str]] = [
    (DIMS, [-512], "its shape [-512] has a negative size"),
    (DIMS, [2**62, 4], "its data do not fit its shape [4611686018427387904, 4]"),
    (DIMS, [513], "its data do not fit its shape [513] of float"),
    (TYPE, 0, "it has the element type 0, which ONNX lacks"),
    (TYPE, 99, "it has the element type 99, which ONNX lacks"),
]


@pytest.mark.parametrize(("place", "value", "words"), TENSORS)
@pytest.mark.parametrize("outside", [False, True], ids=["inside", "external"])
def test_an_impossible_weight(place: str, value: Any, words: str, outside: bool, tmp_path: Path) -> None:
    proto = external(tmp_path, length=None) if outside else base()
    put(proto, place, value)
    error = refused(proto, tmp_path)
    assert "initializer 'w'" in str(error)
    assert words in str(error) or (outside and "which has 2048; its shape" in str(error))


def test_an_initializer_in_a_branch_and_a_constant_are_checked(tmp_path: Path) -> None:
    proto = base()
    node = helper.make_node("Constant", [], ["c"], "three", value=numpy_helper.from_array(np.ones(3)))
    node.attribute[0].t.dims[:] = [-3]
    proto.graph.node.insert(0, node)
    assert "node 'three'" in str(refused(proto, tmp_path))
    branch = onnx.GraphProto(name="then")
    branch.initializer.add(name="inner", data_type=TensorProto.FLOAT, dims=[4], raw_data=b"1234")
    proto = base()
    proto.graph.node.append(helper.make_node("If", ["x"], ["z"], then_branch=branch, else_branch=branch))
    assert "initializer 'inner': its data do not fit" in str(refused(proto, tmp_path))


@values
def test_other_impossible_fields(place: str, value: int, words: str, tmp_path: Path) -> None:
    proto = base()
    put(proto, place, value)
    assert words in str(refused(proto, tmp_path))


@values
def test_impossible_nodes(line: str, words: str, tmp_path: Path) -> None:
    proto = base()
    proto.graph.node.append(onnx.parser.parse_node(line))
    if "Print" in line:
        del proto.graph.node[-1].output[:]
    assert words in str(refused(proto, tmp_path))


def test_a_constant_of_too_few_values(tmp_path: Path) -> None:
    proto = base()
    proto.graph.initializer[1].ClearField("raw_data")
    proto.graph.initializer[1].int64_data.append(3)
    assert "initializer 'shape': its data do not fit its shape [2] of int64" in str(refused(proto, tmp_path))


def test_functions_that_expand_without_measure(tmp_path: Path) -> None:
    proto, imports = base(), [helper.make_opsetid("", 17), helper.make_opsetid("l", 1)]
    for depth in range(30):
        domain, op = ("l", f"f{depth - 1}") if depth else ("", "Relu")
        nodes = [helper.make_node(op, [a], [b], domain=domain) for a, b in ("am", "mb")]
        proto.functions.append(helper.make_function("l", f"f{depth}", ["a"], ["b"], nodes, imports))
    assert "function 'f16': its functions expand to more than 100000 nodes" in str(refused(proto, tmp_path))


ZEROS = [
    ("c", "Conv<group=0>(x, w)", "node 'n': its attribute 'group' is 0, and has to be positive"),
    ("c", "Conv<strides=[1,-1]>(x, w)", "node 'n': its attribute 'strides' is -1, and has to be positive"),
    ("c", "MaxPool<kernel_shape=[0,1]>(x)", "node 'n': its attribute 'kernel_shape' is 0"),
    ("c", "DepthToSpace<blocksize=0>(x)", "node 'n': its attribute 'blocksize' is 0"),
    ("d", "Div(k, zero)", "node 'n': it divides integers by 'zero', which holds a zero"),
    ("d", "Mod(k, zero)", "node 'n': it divides integers by 'zero', which holds a zero"),
]


@pytest.mark.parametrize(("out", "node", "words"), ZEROS, ids=[words for *_, words in ZEROS])
@pytest.mark.parametrize("called", [False, True])
def test_zeros_that_nodes_divide_by(out: str, node: str, words: str, *, called: bool, tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[1,4,8,8] x, float[4,4,3,3] w, int64[2] k) => (float[N,C,H,W] c, int64[2] d)
        <int64[2] zero = {{1, 0}}> {{ [n] {out} = {node} }}""")
    if called and out == "c":
        body = helper.make_function("l", "F", ["x", "w"], ["c"], proto.graph.node, proto.opset_import)
        proto.functions.append(body)
        del proto.graph.node[:]
        words = f"function 'F': {words}"
    assert words in str(refused(proto, tmp_path))


def test_the_checkers_words_name_a_node_without_a_name(tmp_path: Path) -> None:
    proto = base()
    proto.graph.node.append(helper.make_node("TopK", ["x", "shape"], ["", "places"]))
    assert "Node (TopK(places))'s output 0 is marked single" in str(refused(proto, tmp_path))


def test_a_model_without_outputs(tmp_path: Path) -> None:
    proto = base()
    del proto.graph.output[:]
    assert "m.onnx: it has no outputs" in str(refused(proto, tmp_path))


@pytest.mark.parametrize("field", ["input", "output", "initializer"])
def test_more_axes_than_arrays_have(field: str, tmp_path: Path) -> None:
    proto = base()
    if field == "initializer":
        proto.graph.initializer[0].dims[:] = [1] * 103 + [512]
    else:
        shape = getattr(proto.graph, field)[0].type.tensor_type.shape
        shape.dim.extend(shape.dim[:1] * 102)
    assert "it has 104 axes, and an array has at most 64" in str(refused(proto, tmp_path))


@pytest.mark.skipif(not sandbox.FORKS, reason="the size of the memory is read on Linux")
def test_weights_beyond_the_machines_memory(tmp_path: Path) -> None:
    """Sparse on the disk, and 8 TiB by its size."""
    proto = external(tmp_path, length=str(4 * 2**41))
    proto.graph.initializer[0].dims[:] = [2**41]
    os.truncate(tmp_path / "w.bin", 2**43)
    assert "its weights need 8192 GiB, over 2 times this machine's memory" in str(refused(proto, tmp_path))


def calling(*bodies: str) -> onnx.ModelProto:
    """A model that calls the function `f0`; each body is that of `f0`, `f1`, ..."""
    text = '<ir_version: 8, opset_import: ["" : 17, "l" : 1]> g (float[4] x) => (float[4] y) { y = l.f0(x) }'
    for place, body in enumerate(bodies):
        text += f'<domain: "l", opset_import: ["" : 17, "l" : 1]> f{place} (a) => (b) {{ {body} }}'
    return onnx.parser.parse_model(text)


def test_functions_that_call_each_other(tmp_path: Path) -> None:
    error = refused(calling("b = l.f1(a)", "c = l.f0(a) b = Relu(c)"), tmp_path)
    assert "function 'f0': it calls itself, itself or through other functions" in str(error)


def test_many_calls_of_one_function(tmp_path: Path) -> None:
    """The graph calls what stays below the limit, and is above it."""
    bodies = [
        "b = l.f1(a)",
        *(f"c = l.f{n}(a) b = l.f{n}(c)" for n in range(2, 17)),
        "c = Relu(a) b = Neg(c)",
    ]
    proto = calling(*bodies)
    onnx.save(proto, tmp_path / "m.onnx")
    assert load(tmp_path / "m.onnx").proto.functions
    for place in range(2):
        proto.graph.node.append(helper.make_node("f0", ["x"], [f"y{place}"], domain="l"))
    assert "m.onnx: its functions expand to more than 100000 nodes" in str(refused(proto, tmp_path))


def turning(count: str, go: str, inputs: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[2] x) => (float[2] y) <int64 n = {{{count}}}, bool go = {{{go}}}> {{
            [turning] y = Loop({inputs}, x) <body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t)
                {{ d = Identity(c) t = Tanh(s) }}> }}""")


@values
def test_loops_that_do_not_end(count: str, go: str, inputs: str, *, endless: bool, tmp_path: Path) -> None:
    proto = turning(count, go, inputs)
    if endless:
        assert "node 'turning': it does not end" in str(refused(proto, tmp_path))
    else:
        for tensor in proto.graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
        for outside in (False, True):
            onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=outside, size_threshold=0)
            assert load(tmp_path / "m.onnx").proto.graph.node[0].name == "turning"


def test_a_loop_whose_count_is_broken(tmp_path: Path) -> None:
    proto = turning("3", "1", "n, go")
    (count,) = (tensor for tensor in proto.graph.initializer if tensor.name == "n")
    count.CopyFrom(onnx.TensorProto(name="n", data_type=onnx.TensorProto.INT64, raw_data=b"123"))
    assert "initializer 'n': its data do not fit its shape" in str(refused(proto, tmp_path))


def test_graphs_nested_too_deeply_for_protobuf(tmp_path: Path) -> None:
    def message(field: int, content: bytes) -> bytes:
        size, count = b"", len(content)
        while count >= 128:
            size, count = size + bytes([count % 128 | 128]), count // 128
        return bytes([field << 3 | 2]) + size + bytes([count]) + content

    graph = b""
    for _ in range(60):  # GraphProto.node = 1, NodeProto.attribute = 5, AttributeProto.g = 6
        graph = message(1, message(5, message(6, graph)))
    error = refused(b"\x08\x0a" + message(7, graph), tmp_path)
    assert "nested more deeply than protobuf reads" in str(error)


COUNT = sized(100, 5000)
SEED = 17


def test_corrupted_files_are_scanned_or_refused() -> None:
    outcomes = corruption.run(COUNT, SEED)
    counts = Counter(outcome.kind for outcome in outcomes)
    assert sorted(outcome.number for outcome in outcomes) == list(range(COUNT))
    assert not counts["DEFECT"], corruption.report(outcomes, SEED)
    assert counts["ok"] > COUNT / 20, "some corruption is harmless"
    assert counts["ModelError"] > COUNT / 4, "and most is not"
