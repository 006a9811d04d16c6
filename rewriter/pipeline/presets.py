"""Presets: a pipeline by a name, with the options that go with it.

A preset is data. What it sets holds where the user says nothing: `pipeline.config` gives the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rewriter.errors import UsageError
from rewriter.pipeline import migration
from rewriter.pipeline.pass_options import nearest
from rewriter.plan import Precision

OTHERWISE: Mapping[str, Any] = {
    "precision": "fp16",
    "io": "keep",
    "target": "tensorrt",
    "metric": "relative-l2",
    "accumulation": "fp32",
    "weak_typing": False,
}
"""Of the options that presets may set, the values without one."""

DEFAULT_OPSETS: Mapping[Precision, int] = {"fp16": 17, "fp32": 17, "bf16": 22}
"""17 has LayerNormalization, which every TensorRT since 8.6 maps; BF16 Conv exists from 22 on."""


@dataclass(frozen=True)
class Preset:
    """A named pipeline.

    Attributes:
        name: As `--preset` takes it.
        summary: One line without a full stop.
        pipeline: Its passes as text, in the form of `rewriter.pipeline.text`.
        defaults: Arguments of `rewriter.fix` and their values, where the user says nothing.
        about: More to know, as Markdown paragraphs.
        table: What replaces what, for a preset that stands for something older.
    """

    name: str
    summary: str
    pipeline: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    table: tuple[tuple[str, str], ...] = ()

    @property
    def precision(self) -> Precision:
        """What the plan lowers the model to; fp32 leaves types alone."""
        found: Precision = self.choose("precision")
        return found

    def choose(self, option: str, given: Any = None) -> Any:
        """`given`, or if that is None what the preset sets, or what holds without it."""
        return given if given is not None else self.defaults.get(option, OTHERWISE.get(option))


_STRUCTURE = (
    "inline-functions,upgrade-opset,drop-double,simplify,fold-quantized-bias,clean-casts,"
    "merge-branches,fuse-layer-norm,fuse-rms-norm,scale-query,clamp-constants,isolate-clip,drop-round-trips"
)
_LOWER = "compensate-rounding,mixed-precision,clean-casts"
_LOWER_FP16 = "compensate-rounding,transpose-convs,mixed-precision,clean-casts"
_MIXED = f"{_STRUCTURE},{_LOWER}"
_EPILOGUES = (
    "merge-projections,keep-epilogues,compensate-rounding,transpose-convs,"
    "mixed-precision{epilogues=true},clean-casts"
)
_IMAGES = "unfold-patches,fold-strides"
_PRODUCTS = "unfold-dot-products,unflatten-products"
_DEFAULT = f"{_STRUCTURE},{_IMAGES},{_PRODUCTS},postpone-resize,rescale,{_EPILOGUES}"
_ACCURATE = (
    _DEFAULT.replace("unfold-patches", "unfold-patches{depth=1024}")
    .replace("keep-epilogues", "keep-epilogues,split-products")
    .replace("compensate-rounding", "compensate-rounding{tf32=true}")
    .replace("transpose-convs", "transpose-convs{depth=192}")
    .replace("mixed-precision{epilogues=true}", "mixed-precision{epilogues=true},split-images")
)
_FP16 = f"{_STRUCTURE},rescale,{_LOWER}"
_WEAK = f"{_STRUCTURE},rescale,mixed-precision,clean-casts"
_FP16_NORMS = f"{_STRUCTURE},postpone-resize,rescale{{norms=true}},{_LOWER_FP16}"

ACCURATE_COST = 0.16
"""Share of latency that the preset `accurate` may spend on top of `trt-fp16`, by the estimate; that takes
0.87 of AutoCast's in the geometric mean of fourteen networks on an H200 (benchmarks/side_by_side.md). Nets of
Convs got a third of plain FP16's error so (docs/accuracy.md); a search takes less where more gains
nothing."""

_ALL = (
    Preset(
        "trt-fp16",
        "strongly typed FP16 with FP32 islands, and FP32 where it is free",
        _DEFAULT,
        {"precision": "fp16"},
        "The one to begin with, for TensorRT 10 and 11 and for TensorRT-RTX. What overflows outside norms\n"
        "is scaled away where weights can take powers of two (docs/rescaling.md); the rest is kept in FP32.\n"
        "So is what stands elementwise behind an FP16 matrix product, norms, and attention's Softmax:\n"
        "TensorRT-RTX then sums the products in FP32 at the same latency or less (docs/accuracy.md; one\n"
        "H200). That is why projections of one tensor are merged, views stand round norms, and there are\n"
        "many FP32 nodes. Convs of images are written for faster kernels (`unfold-patches`, `fold-strides`;\n"
        "the same page and GPU), and a 1x1 Conv behind a Resize that enlarges is done before it. Where the\n"
        "target was probed to sum FP16 Convs in FP16 and ConvTransposes in FP32, Convs of stride 1 become\n"
        "ConvTransposes.",
    ),
    Preset(
        "trt-fp16-rescaled",
        "FP16 with as few FP32 nodes as rescaling can do with",
        _FP16_NORMS,
        {"precision": "fp16"},
        "As `trt-fp16`, but norms that are written out compute in FP16 except for epsilon and root, and\n"
        "nothing is in FP32 because it is free: fewer FP32 nodes, and more rounding: see docs/rescaling.md.\n"
        "The ranges that it relies on hold for the data that they were measured on.",
    ),
    Preset(
        "trt-bf16",
        "strongly typed BF16 with FP32 islands",
        _MIXED,
        {"precision": "bf16"},
        "BF16 has the range of FP32 and 8 bits of precision: nothing overflows, much is rounded. For Ampere\n"
        "and later.",
    ),
    Preset(
        "trt11-migrate",
        "what `trtexec --fp16` used to mean, for TensorRT 11, which has no such flag",
        _FP16,
        {"precision": "fp16", "io": "keep", "target": "11"},
        migration.ABOUT,
        migration.ROWS,
    ),
    Preset(
        "accurate",
        f"the most accurate FP16 plan for at most {ACCURATE_COST:.0%} more latency",
        _ACCURATE,
        {
            "precision": "fp16",
            "max_latency_cost": ACCURATE_COST,
            "metric": "relative-l2",
            "accumulation": "fp16",
        },
        "The passes of `trt-fp16`, with deep Convs of patches of any channels as products and more Convs as\n"
        "ConvTransposes, then a search that keeps in FP32 what lowers the error most for its cost; weights\n"
        "of such products are rounded together to what TF32 keeps of them, and an image that a Conv in FP32\n"
        "reads is split in two. Errors are emulated with sums as\n"
        "Tensor Cores do them in FP16, and costs are recorded ones; for large models, which would take too\n"
        "long, nodes are ranked with FP32 sums and what the depth of a Conv adds, and fewer plans are\n"
        "tried: the report says so. With `--search gpu` both are measured. A plan is taken if it saves as\n"
        "much of the error, in share, as it costs of latency, and 10 % at least, and else that of the\n"
        "rules, so that the result is never less accurate by that measure.\n"
        "`--max-latency-cost` sets another budget, `--tolerance` an error in its place. Where the budget is\n"
        "enough, the MLPs of transformers with few rows are split (`split-products`).",
    ),
    Preset(
        "weak-typing",
        "FP32, and the plan as constraints for the weakly typed builds of TensorRT 8 to 10",
        _WEAK,
        {"precision": "fp16", "weak_typing": True},
        "For those who stay on `trtexec --fp16` of TensorRT 8 to 10: the model keeps its types. What the\n"
        "plan would keep in FP32 stands beside it twice: as arguments for trtexec (`--layerPrecisions`,\n"
        "`--layerOutputTypes`, `--precisionConstraints=obey`) and as Python that sets the same on a\n"
        "network. `--weak-typing` does the same for any preset.",
    ),
    Preset(
        "structure-only",
        "the graph rewrites alone; types stay as they are",
        _STRUCTURE,
        {"precision": "fp32"},
        "For what comes after it: your own conversion to FP16, quantization, or an FP32 engine.",
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}
DEFAULT_PRESET = "trt-fp16"


def preset_named(name: str) -> Preset:
    """The preset of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in PRESETS:
        hint = f"{nearest(name, PRESETS)}; `rewriter presets` lists them"
        raise UsageError(f"unknown preset {name!r}", where="--preset", hint=hint)
    return PRESETS[name]
