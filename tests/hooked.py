"""Modules that the tests of the hooks export; needs PyTorch."""

from __future__ import annotations

import inspect
from typing import Any

import onnx
import pytest

from rewriter.ir.model import load

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed: pip install '.[hooks]'")

Base: Any = torch.nn.Module


class HandMade(Base):  # type: ignore[misc]
    """A norm in small operators.

    Args:
        size: Of the normalised axis: 1 for channels, -1 for the last.
        centred: LayerNorm, else RMSNorm.
        power: 2 is a norm; anything else is not.
    """

    def __init__(
        self, size: int, axis: int, *, centred: bool = True, eps: float = 1e-6, power: int = 2
    ) -> None:
        super().__init__()
        self.axis, self.centred, self.eps, self.power = axis, centred, eps, power
        self.gain = torch.nn.Parameter(torch.rand(size) + 0.5)
        self.offset = torch.nn.Parameter(torch.rand(size)) if centred else None

    def forward(self, x: Any) -> Any:
        shape = [-1 if axis == self.axis % x.dim() else 1 for axis in range(x.dim())]
        x = x - x.mean(self.axis, keepdim=True) if self.centred else x
        y = x / (x.abs().pow(self.power).mean(self.axis, keepdim=True) + self.eps).sqrt()
        y = y * self.gain.view(shape)
        return y + self.offset.view(shape) if self.offset is not None else y


class Fused(Base):  # type: ignore[misc]
    """Another LayerNorm2d, which is one operator already."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.rand(size)) for _ in range(2))

    def forward(self, x: Any) -> Any:
        x = x.permute(0, 2, 3, 1)
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias).permute(0, 3, 1, 2)


class Net(Base):  # type: ignore[misc]
    """Overflows in FP16: the norm squares activations in the thousands."""

    def __init__(self) -> None:
        super().__init__()
        self.intro = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = HandMade(8, 1)
        self.ending = torch.nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, image: Any, scale: Any = None) -> Any:
        x = self.norm(self.intro(image) * 4000)
        return self.ending(x if scale is None else x * scale)


class Attention(Base):  # type: ignore[misc]
    """Scales the scores after the product (`late`), or the query before it."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.late, self.scale = late, 8**-0.5
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (
            (q @ k.transpose(-1, -2)) * self.scale if self.late else (q * self.scale) @ k.transpose(-1, -2)
        )
        return torch.softmax(scores + torch.zeros(4, 4), -1) @ v


class Calls(Base):  # type: ignore[misc]
    """A module of one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def net() -> Any:
    torch.manual_seed(0)
    return Net().eval()


IMAGE = (1, 3, 16, 16)


def image(seed: int = 0) -> Any:
    return torch.rand(IMAGE, generator=torch.Generator().manual_seed(seed))


QUICK: dict[str, Any] = {"build": False}
HAS_DYNAMO = "kwargs" in inspect.signature(torch.onnx.export).parameters
"""From 2.5 on `torch.onnx.export` takes the newer exporter's arguments."""

newer = pytest.mark.skipif(not HAS_DYNAMO, reason="this PyTorch's torch.onnx.export has no kwargs=")


def fixed(exported: Any) -> onnx.ModelProto:
    """The model that the hook made, which is what the file holds."""
    assert exported.error is None
    assert exported.result is not None
    assert exported.result.verdict is not None
    assert exported.result.verdict.passed
    proto: onnx.ModelProto = exported.result.proto
    if exported.path is not None:
        assert load(exported.path).whole().graph.node == proto.graph.node
    assert any(node.op_type == "Cast" for node in proto.graph.node)
    return proto
