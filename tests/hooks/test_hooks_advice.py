"""The warning before an export: norms that are written by hand."""

from __future__ import annotations

from typing import Any

import pytest

hooked = pytest.importorskip("hooked", reason="PyTorch is not installed: pip install '.[hooks]'")
from hooked import Calls, Fused, HandMade, net, torch  # noqa: E402

from rewriter.hooks.norms import advise  # noqa: E402

nn = torch.nn
TOKENS = (2, 5, 8)

ADVISED = [
    pytest.param(net(), (1, 3, 8, 8), "norm", "LayerNorm over the channels", id="in a network"),
    pytest.param(HandMade(8, 1), (2, 8, 5), "", "LayerNorm over the channels", id="of a sequence"),
    pytest.param(HandMade(8, -1, eps=1e-12), TOKENS, "", "LayerNorm written", id="the last axis"),
    pytest.param(HandMade(8, -1), (2, 8, 8, 8), "", "LayerNorm written", id="the last of equal axes"),
    pytest.param(HandMade(8, -1, centred=False), TOKENS, "", "RMSNorm written", id="RMSNorm"),
]
NOT_ADVISED = [
    pytest.param(nn.Sequential(Fused(8)), (1, 8, 4, 4), id="LayerNorm2d over layer_norm"),
    pytest.param(nn.Sequential(nn.LayerNorm(8), nn.PReLU(8)), TOKENS, id="PyTorch's own"),
    pytest.param(HandMade(8, 1, power=4), (1, 8, 4, 4), id="a fourth power"),
    pytest.param(nn.Sequential(), TOKENS, id="an empty model"),
    pytest.param(Calls(lambda x: x.no_such_thing()), TOKENS, id="a module that does not run"),
]


@pytest.mark.parametrize(("model", "shape", "name", "text"), ADVISED)
def test_a_norm_is_recognised_by_its_results(
    model: Any, shape: tuple[int, ...], name: str, text: str
) -> None:
    (advice,) = advise(model, 100 * torch.randn(shape))
    assert advice.modules == (name,)
    assert text in str(advice) and "\n" not in str(advice)


@pytest.mark.parametrize(("model", "shape"), NOT_ADVISED)
def test_no_advice_is_given(model: Any, shape: tuple[int, ...]) -> None:
    assert advise(model, torch.randn(shape), opset_version=17) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_script_module_gets_no_advice() -> None:
    assert advise(torch.jit.trace(nn.Linear(8, 8), torch.rand(1, 8)), torch.rand(1, 8)) == []


def test_an_operator_set_without_norms_is_named() -> None:
    (advice,) = advise(nn.Linear(8, 8), torch.rand(2, 8), opset_version=16)
    assert "opset_version=16 has no LayerNormalization" in str(advice)


def test_an_inspection_changes_nothing() -> None:
    model = nn.Sequential(net(), nn.BatchNorm2d(3), nn.Dropout(0.5)).train()
    model[0].eval()
    modes = [module.training for module in model.modules()]
    tracked = model[1].num_batches_tracked.clone()
    advise(model, torch.rand(1, 3, 8, 8))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model[1].num_batches_tracked, tracked)
    assert not any(module._forward_hooks for module in model.modules())
