"""The advice before an export, and the norms that `prepare` replaces."""

from __future__ import annotations

import functools
from typing import Any

import pytest

hooked = pytest.importorskip("hooked", reason="PyTorch is not installed: pip install '.[hooks]'")
from hooked import Attention, Calls, Fused, HandMade, net, torch  # noqa: E402

from rewriter.hooks.advice import advise, inspect_module  # noqa: E402
from rewriter.hooks.norm_modules import SAME, NormModule, recognise, replaced  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

nn = torch.nn
SQUARE = (2, 3, 4, 4)
ROWS = (2, 8)
TOKENS = (2, 4, 8)

DOUBLE = Calls(lambda x: x * torch.linspace(0, 1, 8, dtype=torch.float64))
ADVISED = [
    pytest.param(net(), (1, 3, 8, 8), {}, "norm", ("norm",), id="LayerNorm2d by hand"),
    pytest.param(
        nn.Sequential(HandMade(8, -1, centred=False)), TOKENS, {}, "norm", ("0",), id="RMSNorm by hand"
    ),
    pytest.param(nn.Conv2d(3, 3, 1), SQUARE, {"opset_version": 16}, "opset", (), id="opset 16"),
    pytest.param(
        nn.Sequential(Attention(late=True)), TOKENS, {}, "attention-scale", ("0",), id="a late scale"
    ),
    pytest.param(Calls(lambda x: x / (x.abs() + 1e-8)), ROWS, {}, "epsilon", ("",), id="an epsilon of 1e-8"),
    pytest.param(
        Calls(nn.functional.normalize), ROWS, {}, "epsilon", ("",), id="F.normalize clamps at 1e-12"
    ),
    pytest.param(nn.Sequential(DOUBLE), ROWS, {}, "float64", ("0",), id="float64 from linspace"),
    pytest.param(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), ROWS, {}, "training-mode", ("1",), id="dropout"
    ),
    pytest.param(
        nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)),
        SQUARE,
        {},
        "training-mode",
        ("1",),
        id="batch norm",
    ),
]

TEMPERATURE = nn.Sequential(nn.Linear(8, 8), Calls(lambda x: (x * 0.5).softmax(-1)))
TRAINING = nn.Sequential(nn.Dropout(0.1), nn.BatchNorm1d(8))
NOT_ADVISED = [
    pytest.param(nn.Sequential(Fused(8)), (1, 8, 4, 4), {}, id="LayerNorm2d over layer_norm"),
    pytest.param(nn.Sequential(nn.LayerNorm(8)), TOKENS, {}, id="nn.LayerNorm"),
    pytest.param(nn.Sequential(HandMade(8, 1, power=4)), (1, 8, 4, 4), {}, id="a fourth power"),
    pytest.param(nn.Conv2d(3, 3, 1), SQUARE, {"opset_version": 17}, id="opset 17"),
    pytest.param(nn.Sequential(Attention(late=False)), TOKENS, {}, id="scale on the query"),
    pytest.param(Calls(lambda x: (x @ x.mT).mul(0.5).relu()), TOKENS, {}, id="a product without Softmax"),
    pytest.param(TEMPERATURE, TOKENS, {}, id="a temperature"),
    pytest.param(Calls(lambda x: x / (x.abs() + 1e-6)), ROWS, {}, id="an epsilon of 1e-6"),
    pytest.param(Calls(lambda x: x * torch.linspace(0, 1, 8)), ROWS, {}, id="linspace in float32"),
    pytest.param(nn.Sequential(), ROWS, {}, id="an empty model"),
    pytest.param(TRAINING, ROWS, {"dynamo": False}, id="the older exporter switches by itself"),
    pytest.param(nn.Sequential(nn.Dropout(0.0)), ROWS, {}, id="dropout of nothing"),
    pytest.param(Calls(lambda x: x.no_such_thing()), ROWS, {}, id="a module that does not run"),
]


@pytest.mark.parametrize(("model", "shape", "options", "kind", "modules"), ADVISED)
def test_advice_is_given(
    model: Any, shape: tuple[int, ...], options: dict[str, Any], kind: str, modules: tuple[str, ...]
) -> None:
    (found,) = advise(model, torch.rand(shape), **options)
    assert (found.kind, found.modules) == (kind, modules)
    assert str(found).count("\n") == 0


@pytest.mark.parametrize(("model", "shape", "options"), NOT_ADVISED)
def test_no_advice_is_given(model: Any, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    assert advise(model, torch.rand(shape), **options) == []


def test_a_script_module_gets_no_advice() -> None:
    assert advise(torch.jit.trace(nn.Linear(8, 8), torch.rand(1, 8)), torch.rand(1, 8)) == []


def test_a_model_in_float64_gets_no_advice() -> None:
    assert advise(Calls(lambda x: x * 2), torch.rand(2, 8, dtype=torch.float64)) == []


def test_an_inspection_changes_nothing() -> None:
    model = nn.Sequential(net(), nn.BatchNorm2d(3), nn.Dropout(0.5)).train()
    model[0].eval()
    modes = [module.training for module in model.modules()]
    tracked = model[1].num_batches_tracked.clone()
    advise(model, torch.rand(1, 3, 8, 8))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model[1].num_batches_tracked, tracked)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


NORMS = [
    pytest.param(HandMade(8, 1), (2, 8, 5, 6), "layer-norm", 1, 1e-6, id="channels"),
    pytest.param(HandMade(8, 1, eps=1e-5), (2, 8, 5), "layer-norm", 1, 1e-5, id="channels of a sequence"),
    pytest.param(HandMade(8, -1, eps=1e-12), (2, 5, 8), "layer-norm", -1, 1e-12, id="the last axis"),
    pytest.param(HandMade(8, -1), (2, 8, 8, 8), "layer-norm", -1, 1e-6, id="the last of equal axes"),
    pytest.param(HandMade(8, 1), (2, 8, 8, 8), "layer-norm", 1, 1e-6, id="the first of equal axes"),
    pytest.param(HandMade(8, -1, centred=False), (2, 5, 8), "rms-norm", -1, 1e-6, id="RMSNorm"),
    pytest.param(
        HandMade(8, 1, centred=False), (2, 8, 5, 5), "rms-norm", 1, 1e-6, id="RMSNorm over channels"
    ),
]


@pytest.mark.parametrize(("module", "shape", "kind", "axis", "epsilon"), NORMS)
def test_a_norm_is_recognised_by_its_results(
    module: Any, shape: tuple[int, ...], kind: str, axis: int, epsilon: float
) -> None:
    example = 100 * torch.randn(shape)
    norm = recognise("norm", module, example)
    assert norm is not None
    assert (norm.kind, norm.axis, norm.weight) == (kind, axis, "gain")
    assert norm.epsilon == pytest.approx(epsilon, rel=1e-2)
    assert norm.error <= SAME
    with torch.no_grad():
        expected = module(example)
        with replaced([norm]):
            actual = module(example)
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)


NOT_NORMS = [
    pytest.param(HandMade(8, 1, power=4), (2, 8, 5, 6), id="another power"),
    pytest.param(Fused(8), (2, 8, 5, 6), id="one operator already"),
    pytest.param(nn.Linear(8, 8), (2, 5, 8), id="PyTorch's own"),
    pytest.param(nn.PReLU(8), (2, 8, 4, 4), id="PyTorch's own with one parameter"),
    pytest.param(HandMade(8, 1).double(), (2, 8, 5, 6), id="in float64"),
]


@pytest.mark.parametrize(("module", "shape"), NOT_NORMS)
def test_other_modules_are_not_recognised(module: Any, shape: tuple[int, ...]) -> None:
    assert recognise("module", module, torch.randn(shape)) is None


def test_a_norm_with_another_operation_is_not_recognised() -> None:
    class Shifted(HandMade):
        def forward(self, x: Any) -> Any:
            return super().forward(x) + 1e-3

    assert recognise("norm", Shifted(8, 1), torch.randn(2, 8, 5, 6)) is None


def test_an_instance_s_own_forward_is_restored() -> None:
    module = HandMade(8, 1)
    own = functools.partial(HandMade.forward, module)
    module.__dict__["forward"] = own
    norm = NormModule("norm", module, "layer-norm", 1, 1e-6, "gain", "offset", 0.0)

    def failing() -> None:
        with replaced([norm]):
            assert module.forward is not own
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  # its own
        failing()
    assert module.forward is own


def test_rms_norm_needs_its_operator_set() -> None:
    model, example = nn.Sequential(HandMade(8, -1, centred=False)).eval(), torch.rand(2, 4, 8)
    kinds = {}
    for opset, dynamo in ((17, False), (18, True), (23, True)):
        kinds[opset] = [
            n.kind for n in inspect_module(model, (example,), {}, opset_version=opset, dynamo=dynamo).norms
        ]
    assert kinds == {17: [], 18: [], 23: ["rms-norm"]}
