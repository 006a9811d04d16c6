"""The contract of every pass: the promises of its class, on its own example and on every case model."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import apply, graph, model, random_feeds, run
from onnx import helper
from paths import MODELS

import rewriter.passes
from rewriter.hazards.planning.free_fp32 import PROBE
from rewriter.ir.graph import TAG
from rewriter.ir.model import Array, Model, load, walk_graphs
from rewriter.ir.model.tensors import FLOATS
from rewriter.passes.base import Context, Exactness, GraphPass, ModelPass, Pass
from rewriter.runtime.metrics.tolerances import TOLERANCES
from rewriter.target import Target


def _discovered() -> dict[str, type[Pass]]:
    """Every pass by the name of the file that defines it."""
    found: dict[str, type[Pass]] = {}
    for info in pkgutil.iter_modules(rewriter.passes.__path__):
        if info.name == "base":  # what a pass is
            continue
        module = importlib.import_module(f"rewriter.passes.{info.name}")
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, Pass) and kind.__module__ == module.__name__:
                assert info.name not in found, f"{info.name} holds two passes"
                found[info.name] = kind
    return found


FILES = _discovered()
EVERY = [pytest.param(kind, id=kind.name) for kind in FILES.values()]
STRUCTURAL = [kind() for kind in rewriter.passes.ALL if kind.keeps_signature]
CASES = [pytest.param(path, id=path.stem) for path in sorted(MODELS.glob("*.onnx"))]

Feeds = dict[str, Array]
every_pass = pytest.mark.parametrize("kind", EVERY)


def test_all_lists_every_pass_once() -> None:
    assert Counter(rewriter.passes.ALL) == Counter(FILES.values()), "see ALL in rewriter/passes/__init__.py"


@pytest.mark.parametrize(("file", "kind"), [pytest.param(f, k, id=f) for f, k in FILES.items()])
def test_a_pass_is_a_frozen_dataclass_named_after_its_file(file: str, kind: type[Pass]) -> None:
    assert kind.name == file.replace("_", "-")
    assert kind.__name__ == "".join(part.capitalize() for part in file.split("_"))
    assert issubclass(kind, GraphPass) or issubclass(kind, ModelPass)
    assert is_dataclass(kind)
    kind()  # every option has a default
    here = Path(__file__).parent
    tested = (here / "text" / file).is_dir() or (here / f"test_{file}.py").is_file()
    assert tested, f"write graphs into tests/passes/text/{file}/becomes.txt and stays.txt"


@every_pass
def test_it_says_why_it_exists_and_what_its_options_do(kind: type[Pass]) -> None:
    text = kind.__doc__ or ""
    assert not text.startswith(f"{kind.__name__}("), "dataclass made this docstring"
    assert len(text.split()) > 20, "its docstring gives the reason in more than 20 words"
    for option in fields(kind):
        assert f"{option.name}:" in text, "its docstring explains every field under `Options:`"
    assert isinstance(kind.exactness, Exactness)
    assert kind.exactness.source
    assert kind.exactness.tolerance <= TOLERANCES["fp16"].value, "no pass may cost more than FP16 itself"


def _listed_as_inputs(source: onnx.ModelProto) -> onnx.ModelProto:
    """Initializers that callers may override, as IR 3 had it."""
    for tensor in source.graph.initializer:
        source.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return source


def _as_constant_nodes(source: onnx.ModelProto) -> onnx.ModelProto:
    nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in source.graph.initializer]
    nodes += [onnx.NodeProto.FromString(n.SerializeToString()) for n in source.graph.node]
    del source.graph.initializer[:], source.graph.node[:]
    source.graph.node.extend(nodes)
    return source


def _through_identity(source: onnx.ModelProto) -> onnx.ModelProto:
    """Initializers behind Identity nodes, as exporters write shared ones."""
    nodes = []
    for tensor in source.graph.initializer:
        nodes.append(helper.make_node("Identity", [f"{tensor.name}/shared"], [tensor.name]))
        tensor.name += "/shared"
    nodes += [onnx.NodeProto.FromString(n.SerializeToString()) for n in source.graph.node]
    del source.graph.node[:]
    source.graph.node.extend(nodes)
    return source


def _in_a_branch(source: onnx.ModelProto) -> onnx.ModelProto:
    """The whole graph as both branches of an If."""
    inside = onnx.GraphProto()
    inside.CopyFrom(source.graph)
    del inside.input[:]
    outputs = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in source.graph.output]
    for value in outputs:
        value.name += "/chosen"
    inputs = [*source.graph.input, helper.make_tensor_value_info("condition", onnx.TensorProto.BOOL, [])]
    chosen = [v.name for v in outputs]
    node = helper.make_node("If", ["condition"], chosen, then_branch=inside, else_branch=inside)
    made = helper.make_graph([node], "outer", inputs, outputs)
    source.graph.CopyFrom(made)
    return source


VARIANTS = [
    pytest.param(lambda source: source, id="as it stands"),
    pytest.param(_listed_as_inputs, id="initializers listed as inputs"),
    pytest.param(_as_constant_nodes, id="Constant nodes"),
    pytest.param(_through_identity, id="constants through Identity"),
    pytest.param(_in_a_branch, id="in a branch"),
]


@every_pass
def test_before_becomes_after(kind: type[Pass]) -> None:
    wanted = model(kind.after)
    source = model(kind.before)
    step = kind(**kind.example)
    result, report = apply(step, source, _context(wanted.opset))
    assert report.changes, "it changes nothing in its own `before`"
    assert result.opset == wanted.opset
    assert _operators(result) == _operators(wanted)
    assert not kind.refittable or _weights(source) <= _weights(result), "its class has `refittable = False`"


def _weights(source: Model) -> set[str]:
    """Names of the float initializers that hold several numbers."""
    tensors = (t for t in source.proto.graph.initializer if t.data_type in FLOATS)
    return {t.name for t in tensors if np.unique(source.array(t)).size > 1}


@every_pass
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_example_keeps_the_contract(
    kind: type[Pass], variant: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> None:
    source = load(variant(model(kind.before).whole()))
    feeds = random_feeds(source)
    _hold_to_contract(kind(**kind.example), source, feeds, run(source, feeds), model(kind.after).opset)


@every_pass
def test_a_graph_without_the_pattern_stays_byte_identical(kind: type[Pass]) -> None:
    source = graph(
        """
        g (int64[2,3] x, bool c) => (int64[2,3] y) <int64[3] w = {1, 2, 3}> {
            a = Add(x, w)
            y = If (c) <
                then_branch = t () => (int64[2,3] u) { u = Mul(a, w) },
                else_branch = e () => (int64[2,3] v) { v = Neg(a) }
            >
        }"""
    )
    bytes_before = source.whole().SerializeToString(deterministic=True)
    result, report = apply(kind(), source)
    assert result is source
    assert not report.changes
    assert source.whole().SerializeToString(deterministic=True) == bytes_before


@pytest.mark.parametrize("path", CASES)
def test_every_case_keeps_its_results_after_each_pass(path: Path) -> None:
    source = load(path)
    samples = path.with_suffix(".npz")
    feeds = dict(np.load(samples)) if samples.exists() else random_feeds(source)
    results = run(source, feeds)
    for step in STRUCTURAL:
        source, results = _hold_to_contract(step, source, feeds, results)


def _hold_to_contract(
    step: Pass, source: Model, feeds: Feeds, wanted: list[Array], opset: int = 17
) -> tuple[Model, list[Array]]:
    """The model after a pass, with its results."""
    context, untouched = _context(opset), source.copy()
    result, report = apply(step, source, context)
    assert source.same_as(untouched), f"{step.name} changed the model it was given"
    if not report.changes:
        assert result is source
        return source, wanted
    onnx.checker.check_model(result.whole(), full_check=True)
    again, second = apply(step, result, context)
    assert again is result, f"{step.name} changes its own result"
    assert not second.changes
    assert not step.keeps_signature or result.signature == source.signature
    assert step.imported or not _untagged(source, result, step)
    results = run(result, feeds)
    _same_results(step.exactness, wanted, results)
    return result, results


def _context(opset: int) -> Context:
    """A target that gains by every pass."""
    return Context(opset, Target(answers={PROBE: "fp32", "pointwise-conv-heads": "wrong"}))


def _same_results(exactness: Exactness, wanted: list[Array], found: list[Array]) -> None:
    for a, b in zip(wanted, found, strict=True):
        assert a.shape == b.shape
        if exactness.tolerance == 0 or a.dtype.kind != "f":
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
            difference = np.linalg.norm(a.astype(np.float64) - b.astype(np.float64))
            assert difference <= exactness.tolerance * np.linalg.norm(a.astype(np.float64))


def _untagged(source: Model, result: Model, step: Pass) -> Counter[str]:
    """Operators of nodes that are new and do not say which pass made them.

    Counted, for a node that was there before may have other inputs and outputs now.
    """
    untagged = [
        n for n in _nodes(result) if (TAG, step.name) not in {(p.key, p.value) for p in n.metadata_props}
    ]
    return Counter(n.op_type for n in untagged) - Counter(n.op_type for n in _nodes(source))


def _nodes(source: Model) -> list[onnx.NodeProto]:
    functions = [node for function in source.proto.functions for node in function.node]
    return [node for inner in walk_graphs(source.proto.graph) for node in inner.node] + functions


def _operators(source: Model) -> Counter[str]:
    return Counter(node.op_type for node in _nodes(source) if node.op_type != "Constant")
