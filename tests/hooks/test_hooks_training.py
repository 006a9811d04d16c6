"""Modules stay in FP32 by name, and since they switch autocast off, with both exporters."""

from pathlib import Path
from typing import Any

import pytest

from rewriter.base.errors import UsageError

hooked = pytest.importorskip("hooked", reason="PyTorch is not installed: pip install '.[hooks]'")
from hooked import QUICK, newer, torch  # noqa: E402

import rewriter.hooks.torch as hooks  # noqa: E402
from rewriter.hooks.optimum import fix_export  # noqa: E402
from rewriter.hooks.torch import without_autocast  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
EXPORTERS = [
    pytest.param({"dynamo": False, "opset_version": 17}, id="classic"),
    pytest.param({"dynamo": True, "verbose": False}, id="dynamo", marks=newer),
]
Base: Any = torch.nn.Module


def scaled(x: Any, gain: Any) -> Any:
    return torch.sin(x.float() * gain) * torch.sigmoid(gain)


def block(device: str) -> Any:
    def forward(x: Any, gain: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return scaled(x, gain)

    return forward


REGIONS = {
    "cuda": block("cuda"),
    "cpu": block("cpu"),
    "decorator": torch.autocast("cuda", enabled=False)(scaled),
    "on": torch.autocast("cpu", enabled=True)(scaled),
}


class Scale(Base):  # type: ignore[misc]
    """Kept in FP32 by its author; nothing in its ranges asks for that."""

    def __init__(self, region: str) -> None:
        super().__init__()
        self.region, self.gain = region, torch.nn.Parameter(torch.ones(8))

    def forward(self, x: Any) -> Any:
        return REGIONS[self.region](x, self.gain)


class Net(Base):  # type: ignore[misc]
    def __init__(self, region: str = "on") -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Sequential(Scale(region))])
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(region: str) -> Any:
    """A few steps with AMP."""
    torch.manual_seed(0)
    net = Net(region)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.randn(16, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (net(x).float() - x[:, :4]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


def hints(result: Any) -> dict[str, str]:
    """Operators of the nodes that a hint keeps, with the reason."""
    return {d.op: d.reason for d in result.decisions if d.rule == "training"}


def error(result: Any) -> float:
    return float(max(one.relative_l2 for check in result.verdict.checks for one in check.outputs))


@pytest.mark.parametrize("region", ["cuda", "cpu", "decorator"])
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_module_that_switches_autocast_off_is_a_hint(
    exporter: dict[str, Any], region: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, x = trained(region), torch.randn(16, 8)
    options: dict[str, Any] = {"fix": QUICK, "strict": True, **exporter}
    result = hooks.export(net, (x,), tmp_path / "m.onnx", **options).result
    assert result is not None
    assert hints(result)["Sin"] == "module blocks.1.0 ran with autocast off"
    assert "Gemm" not in hints(result)
    assert "modules that switch autocast off: blocks.1.0" in capsys.readouterr().err
    assert net.training and torch.autocast.__init__.__name__ == "__init__", "all is as it was"
    for one in net.modules():
        one.region = "on"  # of Scale
    without = hooks.export(net, (x,), tmp_path / "without.onnx", **options).result
    assert without is not None
    assert hints(without) == {} and error(result) <= error(without)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Scale("cuda").eval(), id="the model as a whole"),
        pytest.param(Net().eval(), id="autocast switched on"),
    ],
)
def test_no_hint(model: Any) -> None:
    assert without_autocast(model, (torch.randn(2, 8),), {}) == []


def test_a_call_that_fails_gives_no_hint() -> None:
    assert without_autocast(Net("cuda"), (), {}) == []


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
