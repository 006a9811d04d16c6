"""Presets: pipelines by name, with the options that go with them.

What a preset sets holds where the user sets nothing: `pipeline.config` gives the order. The passes stand in
`pipeline.preset_steps`, which is imported when they are needed: a shell that completes names does not wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

from rewriter.ir.base import Pass
from rewriter.ir.errors import UsageError, nearest
from rewriter.ir.plan import Precision
from rewriter.pipeline import migration

OTHERWISE: Mapping[str, Any] = {
    "precision": "fp16",
    "io": "keep",
    "target": "tensorrt",
    "metric": "relative-l2",
    "weak_typing": False,
}
"""Defaults of the options that presets may set."""

DEFAULT_OPSETS: Mapping[Precision, int] = {"fp16": 17, "fp32": 17, "bf16": 22}
"""17 has LayerNormalization, which every TensorRT since 8.6 maps; BF16 Conv exists from 22 on."""


@dataclass(frozen=True)
class Preset:
    """A named pipeline.

    Attributes:
        name: As `--preset` takes it.
        summary: One line without a full stop.
        defaults: Options of `rewriter.fix` and their values, where the user sets nothing.
        about: Further explanation, as Markdown paragraphs.
        table: Rows of old and new, for a preset that replaces something older.
    """

    name: str
    summary: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    table: tuple[tuple[str, str], ...] = ()

    @property
    def steps(self) -> tuple[Pass, ...]:
        """Its passes, in their order."""
        from rewriter.pipeline.preset_steps import STEPS

        return STEPS[self.name]

    @property
    def pipeline(self) -> str:
        """Its passes as text, in the form of `rewriter.pipeline.text`."""
        from rewriter.pipeline.text import render

        return render(self.steps)

    @property
    def precision(self) -> Precision:
        """The type that the plan lowers the model to; fp32 keeps types unchanged."""
        found: Precision = self.choose("precision")
        return found

    def choose(self, option: str, given: Any = None) -> Any:
        """`given`; if that is None, the value of the preset, or else the default without a preset."""
        return given if given is not None else self.defaults.get(option, OTHERWISE.get(option))


ACCURATE_COST = 0.16
"""Share of latency that the preset `accurate` may spend on top of `trt-fp16`, by the estimate. Nets of Convs
got a third of plain FP16's error so (docs/accuracy.md); a search takes less where more gains nothing."""

_ALL = (
    Preset(
        "trt-fp16",
        "strongly typed FP16 with FP32 islands",
        {"precision": "fp16"},
        "The one to begin with, for TensorRT 10 and 11 and for TensorRT-RTX. What overflows outside norms\n"
        "is scaled away where weights can take powers of two (docs/rescaling.md); the rest is kept in FP32.\n"
        "Convs of images are written for faster kernels (`unfold-patches`, `fold-strides`), heads of short\n"
        "sequences are projected at once, and a 1x1 Conv after a Resize that enlarges is done before it.\n"
        "Nothing in it cost more than 1 % of latency on a drawn network (benchmarks/README.md). What pays\n"
        "on some and costs on others, such as FP32 after products, is tried where a GPU shows it.",
    ),
    Preset(
        "trt-bf16",
        "strongly typed BF16 with FP32 islands",
        {"precision": "bf16"},
        "BF16 has the range of FP32 and 8 bits of precision: nothing overflows, much is rounded. For Ampere\n"
        "and later.",
    ),
    Preset(
        "trt11-migrate",
        "what `trtexec --fp16` used to mean, for TensorRT 11, which has no such flag",
        {"precision": "fp16", "io": "keep", "target": "11"},
        migration.ABOUT,
        migration.ROWS,
    ),
    Preset(
        "accurate",
        f"the most accurate FP16 plan for at most {ACCURATE_COST:.0%} more latency",
        {
            "precision": "fp16",
            "max_latency_cost": ACCURATE_COST,
            "metric": "relative-l2",
            "accumulation": "fp16",
        },
        "The passes of `trt-fp16`, with FP32 after products, round norms and in Softmax, projections of any\n"
        "length merged, deep Convs of patches of any channels as products, and Convs of\n"
        "stride 1 as ConvTransposes where the target was probed to sum those alone in FP32. Then a search\n"
        "keeps in FP32 what lowers the error most for its cost. Errors are emulated with sums as\n"
        "Tensor Cores do them in FP16, and costs are recorded ones; for large models, which would take too\n"
        "long, nodes are ranked with FP32 sums and what the depth of a Conv adds, and fewer plans are\n"
        "tried: the report says so. A plan is taken if it saves as\n"
        "much of the error, in share, as it costs of latency, and 10 % at least, and else that of the\n"
        "rules, so that the result is never less accurate by that measure.\n"
        "`max-latency-cost` sets another budget, `tolerance` an error in its place.",
    ),
    Preset(
        "weak-typing",
        "FP32, and the plan as constraints for the weakly typed builds of TensorRT 8 to 10",
        {"precision": "fp16", "weak_typing": True},
        "For those who stay on `trtexec --fp16` of TensorRT 8 to 10: the model keeps its types. What the\n"
        "plan would keep in FP32 stands beside it twice: as arguments for trtexec (`--layerPrecisions`,\n"
        "`--layerOutputTypes`, `--precisionConstraints=obey`) and as Python that sets the same on a\n"
        "network. `weak-typing` does the same for any preset.",
    ),
    Preset(
        "structure-only",
        "the graph rewrites alone; types stay as they are",
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
        raise UsageError(f"unknown preset {name!r}", where="`preset`", hint=hint)
    return PRESETS[name]


def select(
    preset: str = DEFAULT_PRESET,
    passes: str | Sequence[str | Pass | EllipsisType] | None = None,
    skip: Iterable[str] = (),
    add: str | Sequence[str | Pass | EllipsisType] = (),
) -> tuple[Pass, ...]:
    """Returns the passes of `preset`, or `passes` in its place, without those in `skip`, with those in `add`.

    Args:
        passes: A pipeline as text, or a list of such texts and passes; `...` stands for the preset's.
        add: As `passes`. Each replaces the one of its name, or stands before the first of a later stage.

    Raises:
        UsageError: an unknown preset, pass or option, or something else than a pass.
    """
    from rewriter.pipeline.registry import check_name
    from rewriter.pipeline.text import listed

    own = preset_named(preset).steps
    chosen = own if passes is None else listed(passes, own)
    dropped = {check_name(name.strip(), "`skip`") for name in skip}
    steps = [step for step in chosen if step.name not in dropped]
    for step in listed(add):
        same = [at for at, other in enumerate(steps) if other.name == step.name]
        later = [at for at, other in enumerate(steps) if other.stage > step.stage]
        at, end = (same[0], same[0] + 1) if same else ([*later, len(steps)][0],) * 2
        steps[at:end] = [step]
    return tuple(steps)
