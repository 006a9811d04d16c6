"""Warns of norms written by hand before an export: their squares overflow FP16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rewriter.hooks.fixing import require

torch = require("torch", "torch", __name__)
_overrides = require("torch.overrides", "torch", __name__)

NORM_OPSET = 17
"""First operator set with LayerNormalization."""

SAME = 1e-6
"""Largest share of a module's variance that a norm leaves: FP32 sums in another order differ by about 1e-14,
an epsilon beside a variance of 1e-3 by 1e-6."""

FUSED = {"layer_norm", "rms_norm", "group_norm", "native_layer_norm"}
"""PyTorch's norms, each of which is exported as one operator."""


@dataclass(frozen=True)
class Advice:
    """A warning; `modules` are names in `named_modules`."""

    modules: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        more = f" and {len(self.modules) - 3} more" if len(self.modules) > 3 else ""
        names = ", ".join(name or "the model" for name in self.modules[:3])
        return f"{names}{more}: {self.what}" if names else self.what


def advise(
    model: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None, *, opset_version: int | None = None
) -> list[Advice]:
    """Returns norms that are written by hand, and warns of an operator set without norms.

    A norm is recognised by its results, not by its name: LayerNorm2d is a dozen different classes. The module
    runs once on the arguments, in eval mode and without gradients; its mode is restored. A module that does
    not run gets no advice, and no error.

    Args:
        args, kwargs: Arguments of `model`; a single tensor needs no tuple.
        opset_version: Operator set of the planned export; None: the exporter's default.
    """
    advice = []
    if opset_version is not None and opset_version < NORM_OPSET:
        what = f"opset_version={opset_version} has no LayerNormalization, and norms in small operators "
        advice.append(Advice((), f"{what}overflow FP16; use {NORM_OPSET} or later"))
    if isinstance(model, torch.nn.Module) and not isinstance(model, torch.jit.ScriptModule):
        norms: dict[str, list[str]] = {}
        positional = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        try:
            for name, kind in _norms(model, positional, kwargs or {}).items():
                norms.setdefault(kind, []).append(name)
        except Exception:  # the export fails in the same way, with a better message
            return advice
        for kind, names in norms.items():
            what = f"{kind} written by hand: squares of 256 and more overflow FP16; torch.nn.functional."
            function = "layer_norm" if kind.startswith("LayerNorm") else "rms_norm (from opset 23 on)"
            advice.append(Advice(tuple(names), f"{what}{function} exports as one operator"))
    return advice


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Puts every module in eval mode, and restores its mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _norms(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """The kind of norm that each module computes in small operators, on its first call."""
    found: dict[str, str] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
            kind = _kind(module, inputs[0], output) if len(inputs) == 1 and name not in found else ""
            if kind and not _is_fused(module, inputs[0]):
                found[name] = kind

        return hook

    modules = [(name, module) for name, module in model.named_modules() if _may_be_norm(module)]
    handles = [module.register_forward_hook(watch(name)) for name, module in modules]
    try:
        with torch.no_grad(), eval_mode(model):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _may_be_norm(module: Any) -> bool:
    """True if the module has the parameters of a norm."""
    own = list(module.parameters(recurse=False))
    return (
        not type(module).__module__.startswith("torch.nn.")
        and next(module.children(), None) is None
        and 1 <= len(own) <= 2
        and len({parameter.numel() for parameter in own}) == 1
    )


def _kind(module: Any, x: Any, y: Any) -> str:
    """`LayerNorm over the channels`; "" if no norm with a factor and offset for each channel gives y."""
    size = next(module.parameters(recurse=False)).numel()
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.shape == y.shape):
        return ""
    for axis, where in ((1, " over the channels"), (-1, "")):
        if x.dim() < 2 or x.shape[axis] != size or (axis == 1 and x.dim() == 2):
            continue
        rows, out = (side.movedim(axis, -1).reshape(-1, size).double() for side in (x, y))
        for kind, centred in (("LayerNorm", rows - rows.mean(-1, keepdim=True)), ("RMSNorm", rows)):
            normal = centred / centred.square().mean(-1, keepdim=True).sqrt()
            normal, target = normal - normal.mean(0), out - out.mean(0)
            factor = (normal * target).sum(0) / normal.square().sum(0)
            left = (target - factor * normal).square().sum() / target.square().sum()
            if float(left) <= SAME and len(rows) > 2:
                return kind + where
    return ""


def _is_fused(module: Any, example: Any) -> bool:
    """True if the module calls one of PyTorch's norms."""
    called: set[str] = set()

    class Names(_overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.add(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Names():
        module.forward(example)
    return bool(called & FUSED)
