"""Runs a module once and observes every operator, with the module that called it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rewriter.hooks.library import require

torch = require("torch", "torch", __name__)
_python_dispatch = require("torch.utils._python_dispatch", "torch", __name__)
_weak = require("torch.utils.weak", "torch", __name__)

FP16_SMALLEST = 2.0**-24
"""The smallest positive number of IEEE 754 binary16, a subnormal."""

_GUARDS = frozenset({"add", "add_", "rsub", "clamp", "clamp_", "clamp_min", "clamp_min_", "maximum"})
_PRODUCTS = frozenset({"bmm", "baddbmm"})
_SCALES = frozenset({"mul", "mul_", "div", "div_"})
_SOFTMAX = frozenset({"_softmax", "softmax", "_safe_softmax"})
_CARRIERS = frozenset(
    "view _unsafe_view reshape expand clone transpose permute _to_copy slice unsqueeze squeeze alias detach "
    "add add_ sub sub_ where masked_fill masked_fill_ maximum clamp clamp_min contiguous split select".split()
)
"""Operators between a product and its Softmax that keep the scores: views, masks, a bias."""


@dataclass
class Observations:
    """Observations of one run.

    Attributes:
        calls: By name, each selected module and the one tensor of its first call.
        late_scales: Modules in which a product of two activations is scaled on its way to Softmax.
        epsilons: Modules that add or clamp to a constant too small for FP16, with the constant.
        doubles: Modules that compute float64 from other types, by operator.
    """

    calls: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    late_scales: list[str] = field(default_factory=list)
    epsilons: list[tuple[str, float]] = field(default_factory=list)
    doubles: dict[str, list[str]] = field(default_factory=dict)


Selector = Callable[[Any, Any], bool]
"""True if a module and its input are kept; keeping all would hold every activation of the model."""


def observe(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], selected: Selector) -> Observations:
    """Run `model` in eval mode, without gradients; modes and hooks are restored.

    Raises:
        Exception: whatever the model raises on these arguments.
    """
    seen, stack = Observations(), [""]
    with (
        torch.no_grad(),
        eval_mode(model),
        _tracked(model, stack, seen, selected),
        _Observer(seen, stack),
    ):
        model(*args, **kwargs)
    return seen


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


@contextmanager
def _tracked(model: Any, stack: list[str], seen: Observations, selected: Selector) -> Iterator[None]:
    """Keeps the name of the running module on top of `stack`."""
    handles = []

    def enter(name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stack.append(name)
            tensor: Any = args[0] if len(args) == 1 and not kwargs else None
            if isinstance(tensor, torch.Tensor) and name not in seen.calls and selected(module, tensor):
                seen.calls[name] = (module, tensor.detach())

        return hook

    def leave(*_: Any) -> None:
        stack.pop()

    try:
        for name, module in model.named_modules():
            if name and not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
                handles.append(module.register_forward_hook(leave))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Observer(_python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
    """Observes the operators below PyTorch's Python API, as exporters see them.

    Knowledge of a tensor is dropped with the tensor.
    """

    def __init__(self, seen: Observations, stack: list[str]) -> None:
        super().__init__()
        self._seen, self._stack = seen, stack
        self._products, self._scaled = _weak.WeakIdKeyDictionary(), _weak.WeakIdKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self._read(function.overloadpacket.__name__, (*args, *(kwargs or {}).values()), out)
        return out

    def _read(self, operator: str, args: Sequence[Any], out: Any) -> None:
        """Observe one call of an ATen operator, without its overload, with all arguments."""
        if operator in _GUARDS:
            lost = (a for a in args if isinstance(a, float) and 0 < abs(a) < FP16_SMALLEST)
            self._seen.epsilons += [(self._stack[-1], epsilon) for epsilon in lost]
        if isinstance(out, torch.Tensor):
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            if out.dtype == torch.float64 and not any(t.dtype == torch.float64 for t in tensors):
                _once(self._seen.doubles.setdefault(operator, []), self._stack[-1])
            self._scores(operator, args, tensors, out)

    def _scores(self, operator: str, args: Sequence[Any], tensors: Sequence[Any], out: Any) -> None:
        """Follow attention scores from the product to Softmax."""
        if operator in _PRODUCTS and not any(isinstance(t, torch.nn.Parameter) for t in tensors):
            self._products[out] = True
        elif operator in _SCALES and any(t in self._products for t in tensors) and _scalar(args):
            self._scaled[out] = self._stack[-1]
        elif operator in _SOFTMAX:
            for tensor in tensors:
                if tensor in self._scaled:
                    _once(self._seen.late_scales, self._scaled[tensor])
        elif operator in _CARRIERS:
            for known in (self._products, self._scaled):
                for tensor in tensors:
                    if tensor in known:
                        known[out] = known[tensor]


def _once(names: list[str], name: str) -> None:
    if name not in names:
        names.append(name)


def _scalar(args: Sequence[Any]) -> bool:
    """True if one of two factors is a number other than 1, or a tensor with one element."""
    numbers = (float(a) for a in args[:2] if isinstance(a, (int, float)))
    tensors = (a for a in args[:2] if isinstance(a, torch.Tensor))
    return any(number != 1 for number in numbers) or any(tensor.numel() == 1 for tensor in tensors)
