"""Recognises norms written by hand by their results, and replaces them by one operator during an export.

Names do not tell: LayerNorm2d is a dozen different classes, some of which export as one operator already. So
a candidate module is run on random probes and compared with the norm that it resembles.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import permutations
from types import MethodType
from typing import Any, Literal

from rewriter.hooks.library import require

torch = require("torch", "torch", __name__)
_overrides = require("torch.overrides", "torch", __name__)

SAME = 1e-5
"""Largest relative L2 difference of a replacement: FP32 sums in another order differ by about 1e-7, a wrong
epsilon, axis or scale by 1e-3 and more."""

PROBE_SCALES = (1e-3, 1.0, 30.0)
"""Standard deviations of probes; at the first, an epsilon of 1e-6 is as large as the variance."""

Kind = Literal["layer-norm", "rms-norm"]


@dataclass(frozen=True)
class NormModule:
    """A module that computes a norm in small operators.

    Attributes:
        name: Name in `named_modules`.
        axis: 1 for channels, -1 for the last axis.
        weight, bias: Names of the module's parameters; None if it has none.
        error: Largest relative L2 difference between module and norm, on the example and on probes.
    """

    name: str
    module: Any
    kind: Kind
    axis: int
    epsilon: float
    weight: str | None
    bias: str | None
    error: float


def recognise(name: str, module: Any, example: Any) -> NormModule | None:
    """Returns the norm that a module computes in small operators, if it computes one.

    Args:
        example: A tensor that the module is called with.
    """
    if not may_be_norm(module, example):
        return None
    try:
        if _is_one_operator(module, example):
            return None
        return next(_matching(name, module, example), None)
    except Exception:  # a module that refuses a probe is no norm
        return None


@contextmanager
def replaced(norms: Sequence[NormModule]) -> Iterator[None]:
    """Replaces the modules' `forward`, and restores it in any case; parameters stay where they are."""
    before = [(norm.module, norm.module.__dict__.get("forward")) for norm in norms]
    try:
        for norm in norms:
            norm.module.forward = MethodType(_forward(norm), norm.module)
        yield
    finally:
        for module, forward in before:
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward


def may_be_norm(module: Any, example: Any) -> bool:
    """True if the module has the parameters of a norm and so is worth a probe."""
    own = list(module.parameters(recurse=False))
    return (
        not type(module).__module__.startswith("torch.nn.")
        and not isinstance(module, torch.jit.ScriptModule)
        and next(module.children(), None) is None
        and next(module.buffers(), None) is None
        and 1 <= len(own) <= 2
        and len({parameter.numel() for parameter in own}) == 1
        and example.dim() >= 2
        and example.dtype == own[0].dtype == torch.float32
        and own[0].numel() in (example.shape[1], example.shape[-1])
    )


def _is_one_operator(module: Any, example: Any) -> bool:
    """True if the module calls one of PyTorch's norms."""
    called: set[str] = set()

    class Names(_overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.add(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Names():
        module(example)
    return bool(called & {"layer_norm", "rms_norm", "group_norm", "native_layer_norm"})


def _matching(name: str, module: Any, example: Any) -> Iterator[NormModule]:
    names = [name for name, _ in module.named_parameters(recurse=False)]
    size = getattr(module, names[0]).numel()
    for axis in (1, -1):
        if example.shape[axis] != size or (axis == 1 and example.dim() == 2):
            continue
        for kind, weight, bias in _roles(names):
            epsilon = _epsilon(module, example, kind, axis, weight, bias)
            if epsilon is None:
                continue
            guess = NormModule(name, module, kind, axis, epsilon, weight, bias, 0.0)
            error = _difference(guess, example)
            if error <= SAME:
                yield replace(guess, error=error)


def _roles(names: Sequence[str]) -> Iterator[tuple[Kind, str, str | None]]:
    if len(names) == 1:
        yield "rms-norm", names[0], None
        yield "layer-norm", names[0], None
        return
    for weight, bias in permutations(names):
        yield "layer-norm", weight, bias


def _epsilon(module: Any, example: Any, kind: Kind, axis: int, weight: str, bias: str | None) -> float | None:
    """Solves y = w (x - m) / sqrt(v + eps) + b for eps on a small probe in float64; None if impossible."""
    wide = copy.deepcopy(module).double().eval()
    x = PROBE_SCALES[0] * torch.randn(example.shape, dtype=torch.float64, device=example.device)
    with torch.no_grad():
        y = wide(x).movedim(axis, -1).double()
        rows = x.movedim(axis, -1)
        y = y - getattr(wide, bias).reshape(-1) if bias else y
        scale = getattr(wide, weight).reshape(-1)
        centred = rows - rows.mean(-1, keepdim=True) if kind == "layer-norm" else rows
        variance = centred.square().mean(-1)
        gain = (y * centred * scale).sum(-1) / (centred * scale).square().sum(-1)
        epsilon = float((gain**-2 - variance).median())
    if not -1e-12 < epsilon < 1:
        return None
    return float(f"{max(epsilon, 0.0):.3g}")


def _difference(norm: NormModule, example: Any) -> float:
    """Largest relative L2 difference of both `forward` on the example and on random probes."""
    forward = _forward(norm)
    probes = [scale * torch.randn_like(example) for scale in PROBE_SCALES]
    worst = 0.0
    with torch.no_grad():
        for x in (example, *probes):
            expected, actual = norm.module(x).double(), forward(norm.module, x).double()
            if expected.shape != actual.shape or not bool(torch.isfinite(actual).all()):
                return float("inf")
            scale = float(expected.norm()) or 1.0
            worst = max(worst, float((actual - expected).norm()) / scale)
    return worst


def _forward(norm: NormModule) -> Callable[[Any, Any], Any]:
    """Returns a `forward` that exports as a normalisation operator, with Transposes for channels."""
    functional = torch.nn.functional

    def normalised(self: Any, x: Any) -> Any:
        weight = getattr(self, norm.weight).reshape(-1) if norm.weight else None
        shape = (x.shape[-1],) if weight is None else (weight.numel(),)
        if norm.kind == "rms-norm":
            return functional.rms_norm(x, shape, weight, norm.epsilon)
        bias = getattr(self, norm.bias).reshape(-1) if norm.bias else None
        return functional.layer_norm(x, shape, weight, bias, norm.epsilon)

    def forward(self: Any, x: Any) -> Any:
        if norm.axis == -1:
            return normalised(self, x)
        axes = [0, *range(2, x.dim()), 1]
        back = [axes.index(axis) for axis in range(x.dim())]
        return normalised(self, x.permute(axes)).permute(back)

    return forward
