"""merge-projections among the other passes: its position, its effects, and plans that fit it."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import graph, ops, with_weights
from nightly import some
from paths import MODELS

from rewriter import api
from rewriter.ir.model import Model, load
from rewriter.passes.base import Context
from rewriter.pipeline.driver import Driver
from rewriter.pipeline.text import parse
from rewriter.runtime.emulation.product_sums import find_product_sums

STRUCTURE = "upgrade-opset,simplify,clean-casts,fuse-layer-norm"
LOWER = "mixed-precision{epilogues=all},clean-casts"
ATTENTION = ("vit", "bert", "swin", "t5_encoder", "llama_block")


def _rewritten(name: str, passes: str) -> Model:
    return Driver().run(load(MODELS / f"{name}.onnx"), parse(passes), Context())[0]


def _fixed(source: Any, passes: str, **options: Any) -> Any:
    return api.fix(source, passes=passes, build=False, **options)


@pytest.mark.parametrize("name", ATTENTION)
def test_scale_query_may_come_before_or_after(name: str) -> None:
    """Q's scale stands behind the projection in either case; only the order of independent nodes differs."""
    first = _rewritten(name, f"{STRUCTURE},merge-projections,scale-query")
    then = _rewritten(name, f"{STRUCTURE},scale-query,merge-projections")
    assert Counter(ops(first)) == Counter(ops(then))
    wiring = [sorted((n.op_type, *n.input, *n.output) for n in m.proto.graph.node) for m in (first, then)]
    assert wiring[0] == wiring[1]


@pytest.mark.parametrize("name", some("llama_block", "vit", "bert", "swin", "t5_encoder"))
def test_merged_products_get_one_fp32_epilogue(name: str) -> None:
    """MatMul in FP16, Cast, Add in FP32, Cast, then the Reshape to heads and Split: what sums in FP32."""
    model = MODELS / f"{name}.onnx"
    result = _fixed(model, f"{STRUCTURE},merge-projections,{LOWER}", inputs=model.with_suffix(".npz"))
    assert result.verdict.passed
    producers = {out: n for n in result.proto.graph.node for out in n.output}
    splits = [n for n in result.proto.graph.node if n.name.endswith("/merged/Split")]
    assert splits
    heads, summed = [], []
    for split in splits:
        chain: list[onnx.NodeProto] = []
        tensor = split.input[0]
        while not chain or chain[-1].op_type != "MatMul":
            chain.append(producers[tensor])
            tensor = chain[-1].input[0]
        if chain[0].op_type == "Reshape":
            chain = chain[1:]
            heads.append(split.name)
        assert [n.op_type for n in chain] == ["Cast", "Add", "Cast", "MatMul"]
        assert [n.attribute[0].i for n in (chain[0], chain[2])] == [
            onnx.TensorProto.FLOAT16,
            onnx.TensorProto.FLOAT,
        ]
        summed.append((0, chain[-1].output[0]))
    assert len(heads) == len(splits) - (2 if name == "llama_block" else 0)  # its gate and up have none
    typed = load(result.proto)
    assert set(summed) <= find_product_sums(typed).summed


def _gated(up: float) -> Model:
    """SwiGLU whose product of gate and up leaves FP16, with a small weight behind it."""
    rng = np.random.default_rng(0)
    sizes = (("wg", (64, 96), 4.0), ("wu", (64, 96), up), ("wd", (96, 64), 1e-4))
    return with_weights(
        """
        g (float[32,64] x, float[64,96] wg, float[64,96] wu, float[96,64] wd) => (float[32,64] y) {
            gate = MatMul(x, wg) sigmoid = Sigmoid(gate) silu = Mul(gate, sigmoid)
            up = MatMul(x, wu) hidden = Mul(silu, up) y = MatMul(hidden, wd) }""",
        {name: (rng.standard_normal(shape) * scale).astype(np.float32) for name, shape, scale in sizes},
    )


def _samples() -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.standard_normal((32, 64)).astype(np.float32)} for _ in range(2)]


def test_rescale_first_gives_every_member_an_exponent_of_its_own() -> None:
    """Sigmoid ties gate to 2^0; up alone can be made smaller, unless the two are one product already."""
    source = _gated(400.0).whole()
    after = _fixed(source, "rescale,merge-projections,mixed-precision", inputs=_samples())
    before = _fixed(source, "merge-projections,rescale,mixed-precision", inputs=_samples())
    assert not after.plan.decisions
    assert {tensor for _, tensor, _ in after.plan.exponents} == {"up", "hidden"}
    assert "overflow" in {decision.rule for decision in before.plan.decisions}
    assert after.verdict.passed and before.verdict.passed


def test_a_member_that_the_user_keeps_stays_apart_and_so_it_does_by_the_saved_plan(tmp_path: Path) -> None:
    source, passes, plan = _gated(1.0).whole(), "merge-projections,mixed-precision", tmp_path / "plan.json"
    kept = _fixed(source, passes, inputs=_samples(), keep_fp32=["up"], save_plan=plan)
    assert ops(load(kept.proto)).count("MatMul") == 3
    assert [decision.rule for decision in kept.plan.decisions] == ["user"]
    assert not [warning for warning in kept.warnings if "names no node" in warning]
    again = _fixed(source, passes, inputs=_samples(), plan=plan)
    assert again.proto.SerializeToString() == kept.proto.SerializeToString()


def test_a_failed_emulation_is_explained_after_rescale_too() -> None:
    """merge-projections needs no ranges: what it did behind `rescale` is done again to explain.

    Both weights of `a` are 1 in FP16, and their difference is all that is left.
    """
    text = """
        g (float[4,2] x) => (float[4,1] y) <float[2,1] a = {1.0004, -1.0001}, float[2,1] b = {-1, -1}> {
            m = MatMul(x, a) n = MatMul(x, b) r = Relu(n) y = Add(m, r) }"""
    ones = [{"x": np.ones((4, 2), np.float32)}]
    steps = "rescale,merge-projections,mixed-precision"
    result = _fixed(graph(text).proto, steps, inputs=ones, repair=False)
    check = next(check for check in result.checks if check.name == "emulation")
    assert check.passed is False and check.details[0].startswith("first beyond")
    assert "/merged/Split" in check.details[0]
