"""Modules stay in FP32 by name, with both exporters."""

from pathlib import Path
from typing import Any

import pytest

from rewriter.base.errors import UsageError

hooked = pytest.importorskip("hooked", reason="PyTorch is not installed: pip install '.[hooks]'")
from hooked import QUICK, newer, torch  # noqa: E402

import rewriter.hooks.torch as hooks  # noqa: E402
from rewriter.hooks.optimum import fix_export  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
EXPORTERS = [
    pytest.param({"dynamo": False, "opset_version": 17}, id="classic"),
    pytest.param({"dynamo": True, "verbose": False}, id="dynamo", marks=newer),
]
Base: Any = torch.nn.Module


class Scale(Base):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: Any) -> Any:
        return torch.sin(x.float() * self.gain) * torch.sigmoid(self.gain)


class Net(Base):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Sequential(Scale())])
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def kept(path: Path, names: list[str], **more: Any) -> list[str]:
    """Operators of the nodes in FP32."""
    net, x = Net().eval(), torch.randn(2, 8)
    options: dict[str, Any] = {"fix": QUICK, "strict": True, "fp32_modules": names, **more}
    exported = hooks.export(net, (x,), path / "m.onnx", **options)
    assert exported.result is not None
    return [decision.op for decision in exported.result.decisions if decision.rule == "user"]


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_modules_by_name_hold_for_all_inside(exporter: dict[str, Any], tmp_path: Path) -> None:
    assert kept(tmp_path, ["blocks.1"], **exporter) == ["Sin", "Mul"]
    assert kept(tmp_path, ["head"], **exporter) == ["Gemm"]
    assert kept(tmp_path, ["blocks.*"], fix={**QUICK, "keep_fp32": "/head/*"}, dynamo=False) == [
        "Gemm", "Sin", "Mul", "Gemm",
    ]  # fmt: skip
    assert kept(tmp_path, [], **exporter) == []


def test_modules_by_name_without_their_model(tmp_path: Path) -> None:
    torch.onnx.export(Net().eval(), (torch.randn(2, 8),), tmp_path / "m.onnx", dynamo=False)
    (one,) = fix_export(tmp_path, fp32_modules=["blocks.?"], fix=QUICK, strict=True)
    assert one.result is not None
    assert [d.op for d in one.result.decisions if d.rule == "user"] == ["Gemm", "Sin", "Mul"]


def test_a_name_that_no_module_has_is_an_error_before_the_export(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fp32_modules=: the model has no module 'blocks.3'"):
        kept(tmp_path, ["blocks.3"], dynamo=False)
    assert not list(tmp_path.iterdir())
