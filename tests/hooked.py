"""Modules that the tests of the hooks export; needs PyTorch."""

import inspect
from pathlib import Path
from typing import Any

import onnx
import pytest

from rewriter.ir.model import load

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed: pip install '.[hooks]'")
Base: Any = torch.nn.Module


class Net(Base):  # type: ignore[misc]
    """Overflows in FP16: the norm by hand squares activations in the thousands."""

    def __init__(self) -> None:
        super().__init__()
        self.intro = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.gain = torch.nn.Parameter(torch.rand(8, 1, 1) + 0.5)
        self.ending = torch.nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, image: Any, scale: Any = None) -> Any:
        x = self.intro(image) * 4000
        x = x - x.mean(1, keepdim=True)
        x = self.gain * x / (x.pow(2).mean(1, keepdim=True) + 1e-6).sqrt()
        return self.ending(x if scale is None else x * scale)


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


def casts(path: Path) -> int:
    """How many Casts a file holds: a plain export of these models has none."""
    return [node.op_type for node in load(path).proto.graph.node].count("Cast")


def fixed(exported: Any) -> onnx.ModelProto:
    """The model that the hook made, which is what the file holds."""
    assert exported.error is None
    assert exported.result is not None and exported.result.verdict is not None
    assert exported.result.verdict.passed
    proto: onnx.ModelProto = exported.result.proto
    if exported.path is not None:
        assert load(exported.path).whole().graph.node == proto.graph.node
    assert any(node.op_type == "Cast" for node in proto.graph.node)
    return proto
