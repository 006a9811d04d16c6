"""How TensorRT's kernels compute single products: the operands of FP32 products, and the sums of FP16 products.

    python benchmarks/product_census.py OUT.json FOLDER fp32    # or fp16; on a GPU; FOLDER as trained_inputs.py makes it

Nodes are MatMul and Conv with random operands on a grid of shapes, and the products of the networks in FOLDER with their
real operands. Each runs alone in an engine. An FP32 product is compared with exact FP32, with operands rounded to TF32,
and with operands cut off. An FP16 product is compared with FP32 sums of the same operands, and with the emulation's.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rewriter.data.inputs import load_samples
from rewriter.emulation import emulation
from rewriter.engines import this_machine
from rewriter.engines.measure import measure
from rewriter.engines.protocol import MeasureSettings, Variant
from rewriter.engines.tensor_files import write_samples
from rewriter.graph.ops import TENSOR_CORE
from rewriter.model import Model, facts, load
from rewriter.verification.expected import run_all

Values = Mapping[str, np.ndarray[Any, Any]]
LARGEST_RESULT = 4_000_000
"""Elements; nodes with larger results are left out."""
PART = 40
"""Random nodes in one engine."""


@dataclass(frozen=True)
class Product:
    """A node with its first three operands; `constant` are the names of its weights."""

    node: NodeProto
    operands: tuple[np.ndarray[Any, Any], ...]
    constant: tuple[bool, ...]
    source: str


def grid(rng: np.random.Generator) -> Iterator[Product]:
    """Random products of many shapes."""
    windows = [((1, 1), (40, 40)), ((3, 3), (40, 40)), ((5, 5), (40, 40)), ((1, 256), (1, 4096))]
    for channels in (1, 3, 8, 16, 32, 64, 256):
        for results in (1, 8, 36, 128):
            for (kernel, image), stride in [(w, s) for w in windows for s in (1, 2)]:
                strides = [1 if kernel[0] == 1 < kernel[1] else stride, stride]
                operands = (
                    rng.standard_normal((1, channels, *image)),
                    rng.standard_normal((results, channels, *kernel)),
                )
                yield Product(
                    helper.make_node("Conv", ["x", "w"], ["y"], strides=strides),
                    operands,
                    (False, True),
                    "random",
                )
    for rows in (1, 2, 8, 100, 1000):
        for depth in (4, 7, 64, 1024):
            for columns, constant in [(c, k) for c in (1, 8, 64, 1000) for k in (True, False)]:
                operands = (
                    rng.standard_normal((1, rows, depth)),
                    rng.standard_normal((1, depth, columns)[constant:]),
                )
                yield Product(
                    helper.make_node("MatMul", ["x", "w"], ["y"]), operands, (False, constant), "random"
                )


def of_network(path: Path) -> Iterator[Product]:
    """The products of a network, each with the operands that a real sample gives it."""
    model = load(path)
    sample = dict(next(iter(load_samples(str(path.with_suffix("") / "tool"), model))))
    known = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    constants = set(known)
    for node in model.proto.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            known[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
        elif node.op_type != "Identity" or node.input[0] not in constants:
            continue
        else:
            known[node.output[0]] = known[node.input[0]]
        constants.add(node.output[0])
    nodes = [n for n in model.proto.graph.node if n.op_type in TENSOR_CORE]
    wanted = {
        name
        for n in nodes
        for name in (*n.input, *n.output)
        if name and name not in constants and name not in sample
    }
    exposed = onnx.load(path)
    outputs = {o.name for o in exposed.graph.output}
    exposed.graph.output.extend(
        helper.make_empty_tensor_value_info(name) for name in sorted(wanted - outputs)
    )
    (values,) = run_all(Model(exposed), [sample])
    known |= {**sample, **values}
    for node in nodes:
        operands = tuple(known[name] for name in node.input if name)
        result = known[node.output[0]]
        if result.dtype == np.float32 and result.size <= LARGEST_RESULT:
            yield Product(node, operands, tuple(name in constants for name in node.input if name), path.stem)


def together(products: list[Product], dtype: Any) -> tuple[Model, dict[str, Any]]:
    """A model of unconnected products, and its inputs."""
    nodes, inputs, outputs, weights, feeds = [], [], [], [], {}
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    for index, product in enumerate(products):
        node = NodeProto()
        node.CopyFrom(product.node)
        node.name, node.output[0] = f"n{index}", f"y{index}"
        del node.input[:]
        for position, (operand, constant) in enumerate(zip(product.operands, product.constant, strict=True)):
            name, value = f"x{index}_{position}", np.ascontiguousarray(operand, dtype=dtype)
            node.input.append(name)
            if constant:
                weights.append(numpy_helper.from_array(value, name))
            else:
                inputs.append(helper.make_tensor_value_info(name, kind, value.shape))
                feeds[name] = value
        nodes.append(node)
        outputs.append(helper.make_tensor_value_info(f"y{index}", kind, None))
    graph = helper.make_graph(nodes, "products", inputs, outputs, weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Model(onnx.shape_inference.infer_shapes(proto)), feeds


def tf32(values: np.ndarray[Any, Any], *, nearest: bool) -> np.ndarray[Any, Any]:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    if nearest:
        bits = bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def with_tf32(product: Product, *, nearest: bool) -> Product:
    """The same product of operands that TF32 holds; a bias stays."""
    first = tuple(tf32(operand, nearest=nearest) for operand in product.operands[:2])
    return Product(product.node, (*first, *product.operands[2:]), product.constant, product.source)


def references(products: list[Product], dtype: Any) -> dict[str, Values]:
    """What the products may come out as, by name."""
    if dtype == np.float32:
        variants = {
            "fp32": products,
            "nearest": [with_tf32(p, nearest=True) for p in products],
            "truncated": [with_tf32(p, nearest=False) for p in products],
        }
        return {name: _run(*together(given, dtype)) for name, given in variants.items()}
    half = [
        Product(p.node, tuple(np.float16(o).astype(np.float32) for o in p.operands), p.constant, p.source)
        for p in products
    ]
    model, feeds = together(products, dtype)
    widened = {name: value.astype(np.float32) for name, value in feeds.items()}
    found = {"fp32 sums": _run(*together(half, np.float32))}
    for name, accumulation in (("emulated fp32", "fp32"), ("emulated fp16", "fp16")):
        found[name] = _run(emulation(model, facts.infer(model), accumulation), feeds, widened)
    return found


def _run(model: Model, *feeds: Values) -> Values:
    wanted = {i.name: i.type.tensor_type.elem_type for i in model.proto.graph.input}
    chosen = next(f for f in feeds[::-1] if all(wanted[n] in (1, 10) for n in f) and _fits(wanted, f))
    return dict(run_all(model, [dict(chosen)])[0])


def _fits(wanted: Mapping[str, int], feeds: Values) -> bool:
    return all(
        wanted[n] == (TensorProto.FLOAT if v.dtype == np.float32 else TensorProto.FLOAT16)
        for n, v in feeds.items()
    )


def rows(products: list[Product], dtype: Any, folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Builds and runs the products; yields what each is and how far it is from each reference."""
    model, feeds = together(products, dtype)
    path = folder / f"{name}.onnx"
    onnx.save(model.proto, path)
    engine = this_machine.choose().engine
    assert engine is not None, "this needs a GPU"
    variant = Variant(name, path, write_samples(folder / f"{name}-feeds", [feeds]))
    expected = references(products, dtype)
    for outcome in measure([variant], MeasureSettings(engine), folder / f"{name}-out"):
        if not outcome.ran:
            print(name, "did not run:", str(outcome.problem)[:300])
            continue
        values = outcome.values(0)
        for index, product in enumerate(products):
            made = np.asarray(values[f"y{index}"], np.float64)
            node = product.node
            attributes = {
                a.name: helper.get_attribute_value(a)
                for a in node.attribute
                if a.name in ("strides", "group")
            }
            exact = np.asarray(expected[next(iter(expected))][f"y{index}"], np.float64)
            size = float(np.linalg.norm(exact)) or 1.0
            yield {
                "op": node.op_type,
                "shapes": [list(o.shape) for o in product.operands[:2]],
                "attributes": attributes,
                "source": product.source,
                "slope": float(np.vdot(made, exact) / (size * size) - 1),
                **{
                    kind: float(np.linalg.norm(made - np.asarray(found[f"y{index}"], np.float64)) / size)
                    for kind, found in expected.items()
                },
                **(
                    {
                        "emulated": float(
                            np.linalg.norm(
                                np.asarray(expected["emulated fp16"][f"y{index}"], np.float64) - exact
                            )
                            / size
                        )
                    }
                    if dtype == np.float16
                    else {}
                ),
            }


def main(out: Path, networks: Path | None, precision: str) -> None:
    dtype = np.float16 if precision == "fp16" else np.float32
    random = list(grid(np.random.default_rng(0)))
    parts = {f"random{i}": random[i : i + PART] for i in range(0, len(random), PART)}
    for path in sorted(networks.glob("*.onnx")) if networks else ():
        try:
            parts[path.stem] = list(of_network(path))
        except Exception as error:  # one network that ONNX Runtime does not run must not end the census
            print(path.stem, "left out:", str(error)[:200])
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, products in parts.items():
            if products:
                found += rows(products, dtype, Path(folder), name)
                print(name, len(products), flush=True)
    out.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        Path(sys.argv[2]) if len(sys.argv) > 2 else None,
        sys.argv[3] if len(sys.argv) > 3 else "fp32",
    )
