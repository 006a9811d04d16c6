"""The passes, one file each. `PURPOSES` lists them; `pipeline/presets.toml` lists the passes of each preset.

`rewriter.run_passes(model, ["simplify", MyPass()])` runs some of them, or your own, on a model.
"""

from collections.abc import Mapping

from rewriter.passes.base import Pass
from rewriter.passes.clamp_constants import ClampConstants
from rewriter.passes.clean_casts import CleanCasts
from rewriter.passes.convtranspose_to_depth_to_space import ConvtransposeToDepthToSpace
from rewriter.passes.decompose_dot_products import DecomposeDotProducts
from rewriter.passes.decompose_einsum import DecomposeEinsum
from rewriter.passes.decompose_group_norm import DecomposeGroupNorm
from rewriter.passes.decompose_operators import DecomposeOperators
from rewriter.passes.demote_float64 import DemoteFloat64
from rewriter.passes.drop_round_trips import DropRoundTrips
from rewriter.passes.fold_quantized_bias import FoldQuantizedBias
from rewriter.passes.fold_strides import FoldStrides
from rewriter.passes.fuse_layer_norm import FuseLayerNorm
from rewriter.passes.fuse_softmax import FuseSoftmax
from rewriter.passes.inline_functions import InlineFunctions
from rewriter.passes.isolate_clip import IsolateClip
from rewriter.passes.keep_epilogues import KeepEpilogues
from rewriter.passes.merge_branches import MergeBranches
from rewriter.passes.merge_conv_groups import MergeConvGroups
from rewriter.passes.merge_projections import MergeProjections
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.passes.pad_channels import PadChannels
from rewriter.passes.pool_before_mean import PoolBeforeMean
from rewriter.passes.postpone_resize import PostponeResize
from rewriter.passes.rescale import Rescale
from rewriter.passes.scale_query import ScaleQuery
from rewriter.passes.simplify import Simplify
from rewriter.passes.unfold_patches import UnfoldPatches
from rewriter.passes.unfold_pooling import UnfoldPooling
from rewriter.passes.upgrade_opset import UpgradeOpset
from rewriter.passes.work_around_convs import WorkAroundConvs

PURPOSES: Mapping[str, tuple[type[Pass], ...]] = {
    "Cleans up the graphs of exporters": (
        InlineFunctions,
        UpgradeOpset,
        Simplify,
        CleanCasts,
        DecomposeEinsum,
        FuseSoftmax,
    ),
    "Repairs models that do not build or give wrong results": (
        DecomposeOperators,
        DemoteFloat64,
        FoldQuantizedBias,
        FuseLayerNorm,
        ScaleQuery,
        ClampConstants,
        IsolateClip,
        WorkAroundConvs,
        DropRoundTrips,
        Rescale,
        DecomposeDotProducts,
        KeepEpilogues,
    ),
    "Speeds up": (
        MergeBranches,
        DecomposeGroupNorm,
        PadChannels,
        UnfoldPatches,
        UnfoldPooling,
        PoolBeforeMean,
        ConvtransposeToDepthToSpace,
        FoldStrides,
        MergeConvGroups,
        PostponeResize,
        MergeProjections,
        MixedPrecision,
    ),
}
"""All our passes by what they are for, in an order that reads well."""

ALL: tuple[type[Pass], ...] = tuple(kind for kinds in PURPOSES.values() for kind in kinds)
