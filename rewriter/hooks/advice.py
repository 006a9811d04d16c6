"""Look at a module before it is exported: what will hurt in FP16, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewriter.hooks.library import needed
from rewriter.hooks.swaps import Swap, may_be_norm, swap_for
from rewriter.hooks.watch import Seen, watch

torch = needed("torch", "torch", __name__)

NORM_OPSET = 17
"""The operator set that brought LayerNormalization."""

RMS_NORM_OPSET = 23
"""The operator set that brought RMSNormalization; PyTorch's older exporter ends at 20."""

RMS_NORM_NEEDS = f", with dynamo=True and opset_version={RMS_NORM_OPSET}"

MOST_NAMED = 3
"""Modules that one line names."""


@dataclass(frozen=True)
class Advice:
    """One thing that will hurt.

    Attributes:
        kind: `norm`, `opset`, `attention-scale`, `epsilon`, `float64` or `training-mode`.
        modules: Names of the modules that it concerns, as `named_modules` has them; "" is the model.
        what: What is wrong and what to do.
    """

    kind: str
    modules: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        named = [name or "the model" for name in self.modules]
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        return f"{', '.join(named[:MOST_NAMED])}{more}: {self.what}" if named else self.what


@dataclass(frozen=True)
class Look:
    """What was seen in a module: advice, and the exchanges that `prepare` would make."""

    advice: tuple[Advice, ...] = ()
    swaps: tuple[Swap, ...] = ()


def advise(
    model: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    opset_version: int | None = None,
    dynamo: bool = True,
) -> list[Advice]:
    """What will hurt when a module is exported and built in FP16.

    The module runs once on the arguments, in eval mode and without gradients; its mode is put back.

    Args:
        args, kwargs: As `model` takes them; a single tensor needs no tuple.
        opset_version: What the export will ask for; None: the exporter's default.
        dynamo: Which exporter it will be.
    """
    given = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    return list(look(model, given, kwargs or {}, opset_version=opset_version, dynamo=dynamo).advice)


def look(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, opset_version: int | None, dynamo: bool
) -> Look:
    """`advise`, with the exchanges; a module that cannot be looked at gets no advice and no error."""
    if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
        return Look(tuple(_opset(opset_version)))
    try:
        seen = watch(model, args, kwargs, may_be_norm)
    except Exception:  # the export runs it, too, and says it better
        return Look((*_opset(opset_version), *_training(model, dynamo)))
    found = [swap for name, call in seen.calls.items() if (swap := swap_for(name, *call))]
    has_rms_norm = dynamo and (opset_version or 0) >= RMS_NORM_OPSET
    usable = tuple(swap for swap in found if swap.kind == "layer-norm" or has_rms_norm)
    inside = {swap.name for swap in found}
    advice = (*_opset(opset_version), *_norms(found, usable), *_ran(seen, inside), *_training(model, dynamo))
    return Look(advice, usable)


def _opset(opset: int | None) -> Iterator[Advice]:
    if opset is not None and opset < NORM_OPSET:
        yield Advice(
            "opset",
            (),
            f"opset_version={opset} has no LayerNormalization: norms are written out in small operators, "
            f"whose squares overflow FP16; use {NORM_OPSET} or later",
        )


def _norms(found: Sequence[Swap], usable: Sequence[Swap]) -> Iterator[Advice]:
    for kind, title in (("layer-norm", "LayerNorm"), ("rms-norm", "RMSNorm")):
        for axis in sorted({swap.axis for swap in found if swap.kind == kind}):
            same = [swap for swap in found if (swap.kind, swap.axis) == (kind, axis)]
            over = "over the channels " if axis == 1 else ""
            lacking = "" if all(swap in usable for swap in same) else RMS_NORM_NEEDS
            todo = f"prepare=True exports it as one operator{lacking}"
            yield Advice(
                "norm",
                tuple(swap.name for swap in same),
                f"a {title} {over}written by hand, whose squares overflow FP16 from 256 on; {todo}",
            )


def _ran(seen: Seen, inside: set[str]) -> Iterator[Advice]:
    """What the run showed; the norms have been told of already."""
    if seen.late_scales:
        yield Advice(
            "attention-scale",
            tuple(seen.late_scales),
            "the attention scale comes after QK^T, whose products can overflow FP16; scale Q before it, or "
            "use scaled_dot_product_attention",
        )
    small: dict[float, list[str]] = {}
    for name, value in seen.epsilons:
        if name not in inside and name not in small.setdefault(value, []):
            small[value].append(name)
    for value, names in small.items():
        if names:
            yield Advice(
                "epsilon",
                tuple(names),
                f"the constant {value:g} is less than FP16 can hold (6e-08) and becomes 0: what it guards "
                "divides by 0; use 1e-6 or more, or keep the operation in FP32",
            )
    for operator, names in seen.doubles.items():
        yield Advice(
            "float64",
            tuple(names),
            f"{operator} makes float64, which TensorRT does not have, and which spreads; say "
            "dtype=torch.float32",
        )


def _training(model: Any, dynamo: bool) -> Iterator[Advice]:
    if not dynamo:
        return  # the older exporter switches to eval mode itself, and back
    kinds = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm)
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module.training and getattr(module, "p", 1) > 0
    ]
    if names:
        yield Advice(
            "training-mode",
            tuple(names),
            "left in training mode, and exported so: outputs are random or depend on the batch; call "
            "model.eval()",
        )
