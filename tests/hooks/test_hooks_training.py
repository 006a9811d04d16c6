"""What training knew: modules that switch autocast off, and modules by name, as hints of the plan."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rewriter.ir.errors import UsageError

hooked = pytest.importorskip("hooked", reason="PyTorch is not installed: pip install '.[hooks]'")
from hooked import QUICK, newer, torch  # noqa: E402

import rewriter.hooks.torch as hooks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
EXPORTERS = [
    pytest.param({"dynamo": False, "opset_version": 17}, id="classic"),
    pytest.param({"dynamo": True, "verbose": False}, id="dynamo", marks=newer),
]
Base: Any = torch.nn.Module


class Scale(Base):  # type: ignore[misc]
    """Kept in FP32 by its author; nothing in its ranges asks for that."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.device, self.gain = device, torch.nn.Parameter(torch.ones(8))

    def forward(self, x: Any) -> Any:
        with torch.autocast(self.device, enabled=False):
            return torch.sin(x.float() * self.gain) * torch.sigmoid(self.gain)


class Net(Base):  # type: ignore[misc]
    def __init__(self, device: str = "cuda", amp: bool = True) -> None:
        super().__init__()
        self.amp = amp
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Sequential(Scale(device))])
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        with nullcontext() if self.amp else torch.autocast("cuda", enabled=False):
            for block in self.blocks:
                x = block(x)
            return self.head(x)


def trained(device: str = "cuda") -> Any:
    """A few steps with AMP."""
    torch.manual_seed(0)
    net = Net(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.randn(16, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (net(x).float() - x[:, :4]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()


def measured(result: Any) -> tuple[int, float]:
    """How many nodes are in FP32, and the emulated error of the worst output."""
    outputs = [one for check in result.verdict.checks for one in check.outputs]
    return len(result.plan.fp32), max(one.relative_l2 for one in outputs)


def hinted(exported: Any) -> dict[str, str]:
    """Operators of the nodes that a hint keeps, with the reason."""
    return {d.op: d.reason for d in exported.result.plan.decisions if d.rule == "training"}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_module_that_switched_autocast_off_is_a_hint(
    exporter: dict[str, Any], device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, x = trained(device), torch.randn(16, 8)
    exported = hooks.export(net, (x,), str(tmp_path / "m.onnx"), fix=QUICK, strict=True, **exporter)
    assert hinted(exported)["Sin"] == "module blocks.1.0 ran with autocast off"
    assert "Gemm" not in hinted(exported)
    assert "modules that training kept in FP32: blocks.1.0" in capsys.readouterr().err
    assert torch.amp.autocast_mode.autocast.__init__.__name__ == "__init__"  # PyTorch is as it was


def test_the_result_is_no_worse_than_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = trained(), torch.randn(16, 8)
    options: dict[str, Any] = {"fix": QUICK, "strict": True, "dynamo": False}
    with_hints = hooks.export(net, (x,), str(tmp_path / "with.onnx"), **options).result
    monkeypatch.setattr(hooks, "hints", lambda *_: {})
    without = hooks.export(net, (x,), str(tmp_path / "without.onnx"), **options).result
    kept, errors = zip(*(measured(result) for result in (with_hints, without)), strict=True)
    assert kept[0] > kept[1] == 0
    assert errors[0] <= errors[1]


def test_modules_by_name_hold_for_all_inside(tmp_path: Path) -> None:
    net, x = torch.nn.Sequential(Net(), torch.nn.Linear(4, 4)).eval(), torch.randn(2, 8)
    options: dict[str, Any] = {"fix": QUICK, "strict": True, "dynamo": False, "fp32_modules": ["0"]}
    exported = hooks.export(net, (x,), str(tmp_path / "m.onnx"), **options)
    assert all(reason.startswith("module 0") for reason in hinted(exported).values())
    assert "module 0.head is one of fp32_modules" in hinted(exported).values()


def test_a_name_that_no_module_has_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fp32_modules=: the model has no module 'blocks.3'"):
        hooks.export(
            Net().eval(),
            (torch.randn(2, 8),),
            str(tmp_path / "m.onnx"),
            fp32_modules=["blocks.3"],
            dynamo=False,
        )


def test_a_model_that_ran_without_amp_as_a_whole_is_no_hint(tmp_path: Path) -> None:
    net = Net(amp=False).eval()
    exported = hooks.export(net, (torch.randn(2, 8),), str(tmp_path / "m.onnx"), fix=QUICK, dynamo=False)
    assert hinted(exported) == {}
