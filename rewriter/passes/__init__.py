"""The passes, one file each. `PURPOSES` lists them; `pipeline/presets.toml` lists the passes of each preset.

`rewriter.run_passes(model, ["simplify", MyPass()])` runs some of them, or your own, on a model.
"""

from collections.abc import Mapping
from importlib import import_module

from rewriter.passes.base import Pass

PURPOSES: Mapping[str, str] = {
    "Cleans up the graphs of exporters": """
        inline-functions upgrade-opset simplify clean-casts decompose-einsum fuse-softmax""",
    "Repairs models that do not build or give wrong results": """
        decompose-operators demote-float64 fold-quantized-bias fuse-layer-norm scale-query clamp-constants
        isolate-clip work-around-convs drop-round-trips rescale decompose-dot-products keep-epilogues
        collect-loop-outputs""",
    "Speeds up": """
        merge-branches decompose-group-norm pad-channels unfold-patches unfold-pooling pool-before-mean
        convtranspose-to-depth-to-space fold-strides merge-conv-groups merge-projections mixed-precision""",
}
"""All our passes by what they are for, in an order that reads well."""


def _pass(name: str) -> type[Pass]:
    """The pass of a name: its file and its class are named after it."""
    module = import_module(f"{__name__}.{name.replace('-', '_')}")
    kind: type[Pass] = getattr(module, name.title().replace("-", ""))
    return kind


ALL: tuple[type[Pass], ...] = tuple(map(_pass, " ".join(PURPOSES.values()).split()))
