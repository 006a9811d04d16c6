"""Norms written by hand, recognised by what they compute, and exchanged for one operator during an export.

A name says little: LayerNorm2d is a dozen different classes, some of which are one operator already. So a
module that could be a norm is run on a probe and compared with the norm it is thought to be.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from types import MethodType
from typing import Any, Literal

from rewriter.hooks.library import needed

torch = needed("torch", "torch", __name__)
_overrides = needed("torch.overrides", "torch", __name__)

SAME = 1e-5
"""Largest relative L2 difference of an exchanged module: FP32 sums in another order differ by about 1e-7;
a wrong epsilon, axis or scale by 1e-3 and more."""

PROBE_SCALES = (1e-3, 1.0, 30.0)
"""Standard deviations of probes: at the first, an epsilon of 1e-6 decides half of the result."""

Kind = Literal["layer-norm", "rms-norm"]


@dataclass(frozen=True)
class Swap:
    """A module and the norm that it was shown to be.

    Attributes:
        name: As `named_modules` has it.
        axis: 1 for channels, -1 for the last axis.
        weight, bias: Names of the module's parameters; None if it has none.
        error: Largest relative L2 difference between the two on the example and on probes.
    """

    name: str
    module: Any
    kind: Kind
    axis: int
    epsilon: float
    weight: str | None
    bias: str | None
    error: float


def swap_for(name: str, module: Any, example: Any) -> Swap | None:
    """The norm that a module computes, if it does that in small operators.

    Args:
        example: The tensor that it is called with.
    """
    if not may_be_norm(module, example):
        return None
    try:
        if _is_one_operator(module, example):
            return None
        return next(_matching(name, module, example), None)
    except Exception:  # a probe that a module refuses says that it is something else
        return None


@contextmanager
def prepared(swaps: Sequence[Swap]) -> Iterator[None]:
    """Exchange what the modules compute with, and put it back whatever happens.

    The modules stay where they are, with their parameters: only `forward` is another one meanwhile.
    """
    before = [(swap.module, swap.module.__dict__.get("forward")) for swap in swaps]
    try:
        for swap in swaps:
            swap.module.forward = MethodType(_forward(swap), swap.module)
        yield
    finally:
        for module, forward in before:
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward


def may_be_norm(module: Any, example: Any) -> bool:
    """Whether a probe is worth while; no convolution gets one."""
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
    """Whether it calls a norm of PyTorch's own."""
    called: set[str] = set()

    class Names(_overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.add(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Names():
        module(example)
    return bool(called & {"layer_norm", "rms_norm", "group_norm", "native_layer_norm"})


def _matching(name: str, module: Any, example: Any) -> Iterator[Swap]:
    names = [name for name, _ in module.named_parameters(recurse=False)]
    size = getattr(module, names[0]).numel()
    for axis in (1, -1):
        if example.shape[axis] != size or (axis == 1 and example.dim() == 2):
            continue
        for kind, weight, bias in _roles(names):
            epsilon = _epsilon(module, example, kind, axis, weight, bias)
            if epsilon is None:
                continue
            guess = Swap(name, module, kind, axis, epsilon, weight, bias, 0.0)
            error = _difference(guess, example)
            if error <= SAME:
                yield Swap(name, module, kind, axis, epsilon, weight, bias, error)


def _roles(names: Sequence[str]) -> Iterator[tuple[Kind, str, str | None]]:
    if len(names) == 1:
        yield "rms-norm", names[0], None
        yield "layer-norm", names[0], None
        return
    for weight, bias in permutations(names):
        yield "layer-norm", weight, bias


def _epsilon(module: Any, example: Any, kind: Kind, axis: int, weight: str, bias: str | None) -> float | None:
    """Measured: y = w (x - m) / sqrt(v + eps) + b, solved for eps on a small probe, in float64.

    None if the module computes something else.
    """
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


def _difference(swap: Swap, example: Any) -> float:
    """Largest relative L2 difference of both forwards on the example and on random probes."""
    forward = _forward(swap)
    probes = [scale * torch.randn_like(example) for scale in PROBE_SCALES]
    worst = 0.0
    with torch.no_grad():
        for x in (example, *probes):
            expected, actual = swap.module(x).double(), forward(swap.module, x).double()
            if expected.shape != actual.shape or not bool(torch.isfinite(actual).all()):
                return float("inf")
            scale = float(expected.norm()) or 1.0
            worst = max(worst, float((actual - expected).norm()) / scale)
    return worst


def _forward(swap: Swap) -> Callable[[Any, Any], Any]:
    """A forward that exports as LayerNormalization or RMSNormalization, with Transposes for channels."""
    functional = torch.nn.functional

    def normalised(self: Any, x: Any) -> Any:
        weight = getattr(self, swap.weight).reshape(-1) if swap.weight else None
        shape = (x.shape[-1],) if weight is None else (weight.numel(),)
        if swap.kind == "rms-norm":
            return functional.rms_norm(x, shape, weight, swap.epsilon)
        bias = getattr(self, swap.bias).reshape(-1) if swap.bias else None
        return functional.layer_norm(x, shape, weight, bias, swap.epsilon)

    def forward(self: Any, x: Any) -> Any:
        if swap.axis == -1:
            return normalised(self, x)
        axes = [0, *range(2, x.dim()), 1]
        back = [axes.index(axis) for axis in range(x.dim())]
        return normalised(self, x.permute(axes)).permute(back)

    return forward
