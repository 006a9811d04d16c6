"""The passes, one file each. `ALL` is the registry's list; `pipeline/presets.toml` has those of presets.

`rewriter.run_passes(model, ["simplify", MyPass()])` runs some of them, or your own, on a model.
"""

from __future__ import annotations

from rewriter.ir.base import Pass
from rewriter.passes.clamp_constants import ClampConstants
from rewriter.passes.clean_casts import CleanCasts
from rewriter.passes.drop_double import DropDouble
from rewriter.passes.drop_round_trips import DropRoundTrips
from rewriter.passes.fold_quantized_bias import FoldQuantizedBias
from rewriter.passes.fold_strides import FoldStrides
from rewriter.passes.fuse_layer_norm import FuseLayerNorm
from rewriter.passes.fuse_softmax import FuseSoftmax
from rewriter.passes.inline_functions import InlineFunctions
from rewriter.passes.isolate_clip import IsolateClip
from rewriter.passes.keep_epilogues import KeepEpilogues
from rewriter.passes.mend_convs import MendConvs
from rewriter.passes.merge_branches import MergeBranches
from rewriter.passes.merge_projections import MergeProjections
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.passes.pad_channels import PadChannels
from rewriter.passes.postpone_resize import PostponeResize
from rewriter.passes.rescale import Rescale
from rewriter.passes.scale_query import ScaleQuery
from rewriter.passes.shuffle_pixels import ShufflePixels
from rewriter.passes.simplify import Simplify
from rewriter.passes.unfold_dot_products import UnfoldDotProducts
from rewriter.passes.unfold_einsum import UnfoldEinsum
from rewriter.passes.unfold_group_norm import UnfoldGroupNorm
from rewriter.passes.unfold_patches import UnfoldPatches
from rewriter.passes.upgrade_opset import UpgradeOpset
from rewriter.passes.widen_groups import WidenGroups

ALL: tuple[type[Pass], ...] = (
    InlineFunctions,
    UpgradeOpset,
    DropDouble,
    Simplify,
    FoldQuantizedBias,
    CleanCasts,
    MergeBranches,
    UnfoldEinsum,
    FuseLayerNorm,
    FuseSoftmax,
    UnfoldGroupNorm,
    ScaleQuery,
    ClampConstants,
    IsolateClip,
    MendConvs,
    DropRoundTrips,
    PadChannels,
    UnfoldPatches,
    ShufflePixels,
    UnfoldDotProducts,
    FoldStrides,
    WidenGroups,
    PostponeResize,
    Rescale,
    MergeProjections,
    KeepEpilogues,
    MixedPrecision,
)
"""Every pass of ours, in any order that reads well."""
