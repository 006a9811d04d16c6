"""Inspects a module before its export for operations that fail in FP16, and advises on repairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewriter.english import article
from rewriter.hooks.library import require
from rewriter.hooks.norm_modules import NormModule, may_be_norm, recognise
from rewriter.hooks.observe import Observations, observe

torch = require("torch", "torch", __name__)

NORM_OPSET = 17
"""First operator set with LayerNormalization."""

RMS_NORM_OPSET = 23
"""First operator set with RMSNormalization; PyTorch's older exporter ends at 20."""

RMS_NORM_NEEDS = f", with dynamo=True and opset_version={RMS_NORM_OPSET}"

MOST_NAMED = 3
"""Most modules named in one line."""


@dataclass(frozen=True)
class Advice:
    """One problem, with its repair.

    Attributes:
        kind: `norm`, `opset`, `attention-scale`, `epsilon`, `float64` or `training-mode`.
        modules: Names of the affected modules in `named_modules`; "" is the model.
        what: The problem and what to do.
    """

    kind: str
    modules: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        named = [name or "the model" for name in self.modules]
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        return f"{', '.join(named[:MOST_NAMED])}{more}: {self.what}" if named else self.what


@dataclass(frozen=True)
class Inspection:
    """Result of an inspection: advice, and the norms that `prepare` can replace."""

    advice: tuple[Advice, ...] = ()
    norms: tuple[NormModule, ...] = ()


def advise(
    model: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    opset_version: int | None = None,
    dynamo: bool = True,
) -> list[Advice]:
    """Returns problems to expect when a module is exported and built in FP16.

    The module runs once on the arguments, in eval mode and without gradients; its mode is restored.

    Args:
        args, kwargs: Arguments of `model`; a single tensor needs no tuple.
        opset_version: Operator set of the planned export; None: the exporter's default.
        dynamo: True if the newer exporter will be used.
    """
    given = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    return list(inspect_module(model, given, kwargs or {}, opset_version=opset_version, dynamo=dynamo).advice)


def inspect_module(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, opset_version: int | None, dynamo: bool
) -> Inspection:
    """`advise`, with the norms found. A module that does not run gets less advice, and no error."""
    if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
        return Inspection(tuple(_opset(opset_version)))
    try:
        seen = observe(model, args, kwargs, may_be_norm)
    except Exception:  # the export fails in the same way, with a better message
        return Inspection((*_opset(opset_version), *_training(model, dynamo)))
    found = [norm for name, call in seen.calls.items() if (norm := recognise(name, *call))]
    has_rms_norm = dynamo and (opset_version or 0) >= RMS_NORM_OPSET
    usable = tuple(norm for norm in found if norm.kind == "layer-norm" or has_rms_norm)
    names = {norm.name for norm in found}
    advice = (
        *_opset(opset_version),
        *_norms(found, usable),
        *_observed(seen, names),
        *_training(model, dynamo),
    )
    return Inspection(advice, usable)


def _opset(opset: int | None) -> Iterator[Advice]:
    if opset is not None and opset < NORM_OPSET:
        yield Advice(
            "opset",
            (),
            f"opset_version={opset} has no LayerNormalization: norms are exported as small operators, "
            f"whose squares overflow FP16; use {NORM_OPSET} or later",
        )


def _norms(found: Sequence[NormModule], usable: Sequence[NormModule]) -> Iterator[Advice]:
    for kind, title in (("layer-norm", "LayerNorm"), ("rms-norm", "RMSNorm")):
        for axis in sorted({norm.axis for norm in found if norm.kind == kind}):
            same = [norm for norm in found if (norm.kind, norm.axis) == (kind, axis)]
            over = "over the channels " if axis == 1 else ""
            lacking = "" if all(norm in usable for norm in same) else RMS_NORM_NEEDS
            todo = f"prepare=True exports it as one operator{lacking}"
            yield Advice(
                "norm",
                tuple(norm.name for norm in same),
                f"{article(title)} {over}written by hand: squares of 256 and more overflow FP16; {todo}",
            )


def _observed(seen: Observations, norms: set[str]) -> Iterator[Advice]:
    """Advice on other modules than norms, which have their own."""
    if seen.late_scales:
        yield Advice(
            "attention-scale",
            tuple(seen.late_scales),
            "the attention scale is applied after QK^T, which can overflow FP16; scale Q before it, or "
            "use scaled_dot_product_attention",
        )
    small: dict[float, list[str]] = {}
    for name, value in seen.epsilons:
        if name not in norms and name not in small.setdefault(value, []):
            small[value].append(name)
    for value, names in small.items():
        if names:
            yield Advice(
                "epsilon",
                tuple(names),
                f"the constant {value:g} is below FP16's smallest number (6e-08) and becomes 0, so the "
                "guarded operation divides by 0; use 1e-6 or more, or keep the operation in FP32",
            )
    for operator, names in seen.doubles.items():
        yield Advice(
            "float64",
            tuple(names),
            f"{operator} computes float64, which TensorRT lacks, and so do its consumers; use "
            "dtype=torch.float32",
        )


def _training(model: Any, dynamo: bool) -> Iterator[Advice]:
    if not dynamo:
        return  # the older exporter switches to eval mode itself
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
            "exported in training mode: outputs are random or depend on the batch; call model.eval()",
        )
