"""The passes of each preset, in their order."""

from __future__ import annotations

from collections.abc import Mapping

from rewriter.ir.base import Pass
from rewriter.passes.clamp_constants import ClampConstants
from rewriter.passes.clean_casts import CleanCasts
from rewriter.passes.drop_double import DropDouble
from rewriter.passes.drop_round_trips import DropRoundTrips
from rewriter.passes.fold_quantized_bias import FoldQuantizedBias
from rewriter.passes.fold_strides import FoldStrides
from rewriter.passes.fuse_layer_norm import FuseLayerNorm
from rewriter.passes.fuse_rms_norm import FuseRmsNorm
from rewriter.passes.fuse_softmax import FuseSoftmax
from rewriter.passes.inline_functions import InlineFunctions
from rewriter.passes.isolate_clip import IsolateClip
from rewriter.passes.keep_epilogues import KeepEpilogues
from rewriter.passes.merge_branches import MergeBranches
from rewriter.passes.merge_projections import MergeProjections
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.passes.postpone_resize import PostponeResize
from rewriter.passes.rescale import Rescale
from rewriter.passes.scale_query import ScaleQuery
from rewriter.passes.shuffle_pixels import ShufflePixels
from rewriter.passes.simplify import Simplify
from rewriter.passes.transpose_convs import TransposeConvs
from rewriter.passes.unflatten_products import UnflattenProducts
from rewriter.passes.unfold_dot_products import UnfoldDotProducts
from rewriter.passes.unfold_einsum import UnfoldEinsum
from rewriter.passes.unfold_patches import UnfoldPatches
from rewriter.passes.upgrade_opset import UpgradeOpset

Steps = tuple[Pass, ...]


def replaced(steps: Steps, *changed: Pass) -> Steps:
    """The steps, each of `changed` in place of the one step of its class.

    Raises:
        ValueError: there is no such step, or several.
    """
    for step in changed:
        at = _position(steps, type(step))
        steps = (*steps[:at], step, *steps[at + 1 :])
    return steps


def inserted(steps: Steps, before: type[Pass], step: Pass) -> Steps:
    """The steps with another one before the one step of class `before`.

    Raises:
        ValueError: there is no such step, or several.
    """
    at = _position(steps, before)
    return (*steps[:at], step, *steps[at:])


def _position(steps: Steps, kind: type[Pass]) -> int:
    positions = [i for i, step in enumerate(steps) if type(step) is kind]
    if len(positions) != 1:
        raise ValueError(f"{kind.name} stands {len(positions)} times in {[step.name for step in steps]}")
    return positions[0]


STRUCTURE: Steps = (
    InlineFunctions(),
    UpgradeOpset(),
    DropDouble(),
    Simplify(),
    FoldQuantizedBias(),
    CleanCasts(),
    MergeBranches(),
    UnfoldEinsum(),
    FuseLayerNorm(),
    FuseRmsNorm(),
    FuseSoftmax(),
    ScaleQuery(),
    ClampConstants(),
    IsolateClip(),
    DropRoundTrips(),
)
LOWER: Steps = (MixedPrecision(), CleanCasts())
FP16: Steps = (*STRUCTURE, Rescale(), *LOWER)
DEFAULT: Steps = (
    *STRUCTURE,
    UnfoldPatches(),
    FoldStrides(),
    ShufflePixels(),
    UnfoldDotProducts(),
    PostponeResize(),
    Rescale(),
    MergeProjections(longest=256),
    *LOWER,
)
EPILOGUES: Steps = (
    *inserted(replaced(DEFAULT, MergeProjections()), UnfoldDotProducts, UnflattenProducts())[: -len(LOWER)],
    KeepEpilogues(),
    *replaced(LOWER, MixedPrecision(epilogues=True)),
)
"""The default with FP32 that costs nothing on some networks, and 2 to 18 % of latency on others."""
ACCURATE: Steps = inserted(
    replaced(EPILOGUES, UnfoldPatches(depth=1024)), MixedPrecision, TransposeConvs(depth=192)
)

STEPS: Mapping[str, Steps] = {
    "trt-fp16": DEFAULT,
    "trt-bf16": (*STRUCTURE, *LOWER),
    "trt11-migrate": FP16,
    "accurate": ACCURATE,
    "weak-typing": FP16,
    "structure-only": STRUCTURE,
}
"""By the name of the preset."""
