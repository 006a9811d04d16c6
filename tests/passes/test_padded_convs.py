"""pad-channels and merge-conv-groups on random networks of Convs: equal results and names."""

from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import apply, keeps_results, model_of
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from rewriter.ir.model import Array, Model
from rewriter.passes.base import Pass
from rewriter.passes.merge_conv_groups import MergeConvGroups
from rewriter.passes.pad_channels import PadChannels

STEPS = {
    "pad-channels": PadChannels(step=4, least=2),
    "pad-channels, one channel": PadChannels(step=3, least=0),
    "merge-conv-groups": MergeConvGroups(width=4, step=4),
}
UNARY = "Relu Sigmoid Neg Abs HardSigmoid LeakyRelu Tanh Softplus Identity Clip Dropout".split()
KINDS = "conv conv grouped grouped unary row row both both norm joined resized padded pooled reduced "
KINDS += "excited branch"

Sizes = tuple[int, ...]


class Network:
    """Grows by random nodes; `tensors` has the channels and sizes of each tensor that is no dead end."""

    def __init__(self, random: Random) -> None:
        self.random, self.rng = random, np.random.default_rng(random.randint(0, 2**31))
        self.nodes, self.weights = list[onnx.NodeProto](), dict[str, Array]()
        self.known = random.choice([True, False])  # sizes of the image; unknown ones are run with 2
        size = tuple(
            random.choice([1, 3, 4]) if self.known else 2 for _ in range(random.choice([1, 2, 2, 2, 3]))
        )
        self.ones, self.tensors = (1,) * len(size), {"x": (random.choice([1, 3, 5]), size)}

    def grow(self) -> None:
        x = self.random.choice(list(self.tensors)[-4:])
        grown = getattr(self, self.random.choice(KINDS.split()))(x, *self.tensors[x])
        if grown is not None:
            self.tensors[grown[0]] = grown[1:]

    def held(self, value: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = np.asarray(value)
        return name

    def weight(self, *shape: int) -> str:
        """A positive constant; it may be one that other nodes read."""
        same = [
            name for name, value in self.weights.items() if value.shape == shape and value.dtype == np.float32
        ]
        if same and self.random.random() < 0.3:
            return self.random.choice(same)
        return self.held(self.rng.uniform(0.5, 1.5, shape).astype(np.float32))

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [f"t{len(self.nodes)}"], name, **attributes))
        return str(self.nodes[-1].output[0])

    def conv(self, x: str, channels: int, size: Sizes, out: int = 0, groups: int = 1) -> Any:
        choose, out = self.random.choice, out or self.random.choice([1, 3, 5, 6, 8, 8])
        kernel, steps = [choose([1, 3]) for _ in size], [choose([1, 2]) for _ in size]
        pads: dict[str, Any] = choose([{"auto_pad": "SAME_LOWER"}, {"pads": [k // 2 for k in kernel] * 2}])
        inputs = [x, self.weight(out, channels // groups, *kernel), *choose([[], [self.weight(out)]])]
        new = self.node("Conv", *inputs, group=groups, strides=steps, **pads)
        return new, out, tuple(-(-s // step) for s, step in zip(size, steps, strict=True))

    def grouped(self, x: str, channels: int, size: Sizes) -> Any:
        if channels % 4:
            x, channels, size = self.conv(x, channels, size, 8)
        groups = self.random.choice([channels // 4, channels // 2, channels // 2, channels])
        return self.conv(x, channels, size, channels, groups)

    def unary(self, x: str, channels: int, size: Sizes) -> Any:
        return self.node(self.random.choice(UNARY), x), channels, size

    def row(self, x: str, channels: int, size: Sizes) -> Any:
        shapes = [(), (channels, *self.ones), (1, channels, *self.ones), size, (channels, *size)]
        constant = self.weight(*self.random.choice([*shapes, (1, 1, *self.ones), (1, 1, 1, *self.ones)]))
        op, pair = self.random.choice(["Add", "Sub", "Mul", "Div", "Sum"]), [x, constant]
        new = self.node(op, *(pair if op == "Div" or self.random.random() < 0.5 else pair[::-1]))
        return (new, channels, size) if self.weights[constant].ndim <= 2 + len(size) else None

    def both(self, x: str, channels: int, size: Sizes) -> Any:
        fit = [n for n, (c, s) in self.tensors.items() if c in (1, channels) and s in (size, self.ones)]
        other, op = self.random.choice([x, *fit]), self.random.choice(["Add", "Sub", "Mul"])
        return self.node(op, x, self.node("Tanh", other) if op == "Mul" else other), channels, size

    def norm(self, x: str, channels: int, size: Sizes) -> Any:
        rows = [self.weight(channels) for _ in range(4)]
        return self.node("BatchNormalization", x, *rows, epsilon=0.0), channels, size

    def joined(self, x: str, channels: int, size: Sizes) -> Any:
        other = self.random.choice([name for name, (_, sizes) in self.tensors.items() if sizes == size])
        new = self.node("Concat", x, other, axis=self.random.choice([1, -1 - len(size)]))
        return new, channels + self.tensors[other][0], size

    def resized(self, x: str, channels: int, size: Sizes) -> Any:
        scales = self.held(np.array([1, 1, *(2 for _ in size)], np.float32))
        return self.node("Resize", x, "", scales, mode="nearest"), channels, tuple(2 * s for s in size)

    def padded(self, x: str, channels: int, size: Sizes) -> Any:
        more = self.random.choice([0, 0, 1])
        pads = self.held([0, more, *self.ones, 0, 0, *(0 for _ in size)])
        return self.node("Pad", x, pads, self.weight()), channels + more, tuple(s + 1 for s in size)

    def pooled(self, x: str, channels: int, size: Sizes) -> Any:
        op = self.random.choice(["MaxPool", "AveragePool", "GlobalAveragePool"])
        attributes = {} if op.startswith("G") else {"kernel_shape": self.ones}
        return self.node(op, x, **attributes), channels, self.ones if op.startswith("G") else size

    def reduced(self, x: str, channels: int, size: Sizes) -> Any:
        axes = self.random.choice([[1], [2], [-1], list(range(-len(size), 0))])
        keep = self.random.choice([0, 1])
        new = self.node("ReduceSum", x, self.held(axes), keepdims=keep)
        gone = {axis % (2 + len(size)) for axis in axes}
        left = (1 if axis in gone else s for axis, s in enumerate((channels, *size), 1))
        return new if keep else self.node("Unsqueeze", new, self.held(axes)), next(left), tuple(left)

    def excited(self, x: str, channels: int, size: Sizes) -> Any:
        few = self.random.choice([1, 3])
        small = self.node("Conv", self.node("GlobalAveragePool", x), self.weight(few, channels, *self.ones))
        large = self.node("Conv", self.node("Relu", small), self.weight(channels, few, *self.ones))
        return self.node("Mul", x, self.node("Sigmoid", large)), channels, size

    def branch(self, x: str, channels: int, size: Sizes) -> Any:
        def part(op: str) -> onnx.GraphProto:
            out = helper.make_tensor_value_info(f"{op}{len(self.nodes)}", TensorProto.FLOAT, None)
            return helper.make_graph([helper.make_node(op, [x], [out.name])], op, [], [out])

        return (
            self.node("If", self.held(True), then_branch=part("Relu"), else_branch=part("Neg")),
            channels,
            size,
        )

    def model(self) -> Model:
        """The outputs are all tensors that nothing reads, and some others."""
        read = {name for node in self.nodes for name in node.input}
        names = [node.output[0] for node in self.nodes]
        outputs = [name for name in names if name not in read or self.random.random() < 0.05]
        channels, size = self.tensors["x"]
        sizes = size if self.known else [f"s{at}" for at in range(len(size))]
        shape: list[int | str] = [self.random.choice([1, 3, 5]) if self.known else "N", channels, *sizes]
        opset = self.random.choice([13, 17, 18, 21])
        return model_of(self.nodes, {"x": shape}, outputs, self.weights, opset=opset)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@given(random=st.randoms(use_true_random=False))
def test_networks_of_convs_keep_results_and_names(step: Pass, random: Random) -> None:
    network = Network(random)
    for _ in range(random.randint(4, 14)):
        network.grow()
    before = network.model()
    after, _ = apply(step, before)
    assert {node.name for node in network.nodes} == {node.name for node in after.proto.graph.node}
    if after is not before:
        keeps_results(before, after, step)
