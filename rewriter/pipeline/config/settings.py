"""The options that files and the environment may set: the fields of one dataclass, and nothing else.

A field gives an option its key in a file, its variable in the environment, its type, its check, its line in
docs/configuration.md and its row in `rewriter config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from rewriter.base import Target
from rewriter.emulation import Accumulation
from rewriter.pipeline.config import checks
from rewriter.pipeline.presets import DEFAULT_PRESET, preset_named
from rewriter.plan import InputsOutputs, Precision

Command = Literal["fix", "scan", "verify"]
Shapes = Mapping[str, tuple[int, ...]]
PREFIX = "REWRITER_"


def _option(
    text: str,
    default: Any = None,
    *,
    of: tuple[Command, ...] = ("fix",),
    check: Callable[[Any], object] | None = None,
    words: tuple[str, ...] = (),
) -> Any:
    """A field. `text` explains it, `of` lists the commands that read it, `words` what else it is called."""
    return field(default=default, metadata={"text": text, "of": of, "check": check, "words": words})


_BOTH: tuple[Command, ...] = ("fix", "scan")
_ALL: tuple[Command, ...] = ("fix", "scan", "verify")
_RUN: tuple[Command, ...] = ("fix", "verify")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options by the names that `rewriter.fix`, `rewriter.scan` and `rewriter.verify` have for them.

    `report` and `fail_on` belong to the commands alone. None means that the preset or the function decides.
    """

    preset: str = _option(
        "pipeline and defaults by a name: `rewriter presets`", DEFAULT_PRESET, of=_BOTH, check=preset_named
    )
    passes: str | None = _option(
        "a pipeline in the preset's place, options included", check=checks.pipeline, words=("pipeline",)
    )
    skip: tuple[str, ...] = _option("passes to leave out", (), check=checks.passes, words=("exclude",))
    opset: int | None = _option(
        "operator set of the result; without it 17, and 22 for BF16", check=checks.opset
    )
    target: str | None = _option(
        "`tensorrt`, `tensorrt-rtx`, or a version such as `10.3`", of=_BOTH, check=Target.parse
    )
    precision: Precision | None = _option("what nodes compute in", of=_BOTH, words=("dtype",))
    io: InputsOutputs | None = _option("types of the model's inputs and outputs", words=("io-types",))
    keep_fp32: tuple[str, ...] = _option(
        "patterns of names of nodes that stay in FP32", (), words=("nodes", "kept-nodes", "nodes-to-exclude")
    )
    keep_fp32_op: tuple[str, ...] = _option(
        "operators that stay in FP32", (), words=("ops", "op-types", "op-types-to-exclude")
    )
    plan: Path | None = _option("a plan to apply exactly, as `--save-plan` wrote it")
    tolerance: float | None = _option(
        "fix: search for the cheapest plan that emulates within this; verify: what is allowed",
        of=_RUN,
        check=checks.a_number,
    )
    max_latency_cost: float | None = _option(
        "search for the most accurate plan that costs at most this share of latency: `0.05`",
        check=checks.a_share,
        words=("latency-cost", "budget"),
    )
    metric: str | None = _option("of accuracy: what `tolerance` is one of", of=_RUN, check=checks.metric)
    weak_typing: bool | None = _option("write FP32, and constraints for the builder of TensorRT 8 to 10")
    inputs: Path | None = _option(
        "sample data: npz, folder, or Polygraphy's JSON", of=_ALL, words=("data", "samples", "calibration")
    )
    input_shapes: Shapes | None = _option(
        "shapes of inputs for random data", of=_ALL, words=("shapes", "input-shape")
    )
    seed: int = _option("seed of random data", 0, of=_ALL, check=checks.not_negative)
    verify: bool = _option("compare, emulate and build", True)
    build: bool = _option("build with TensorRT as a part of that", True)
    accumulation: Accumulation | None = _option("how the emulation sums FP16 MatMul, Gemm and Conv", of=_RUN)
    strict: bool = _option("write nothing if a check fails", False)
    build_timeout: float = _option("seconds for TensorRT's build", 600.0, check=checks.positive)
    engine: str = _option("what builds and runs; auto: the best here", "auto", of=_RUN, check=checks.engine)
    builds: int = _option(
        "how often it builds; the worst build is judged",
        1,
        of=("verify",),
        check=checks.at_least_one,
    )
    plugin_lib: tuple[Path, ...] = _option(
        "shared libraries with TensorRT plugins", (), of=_RUN, words=("plugins",)
    )
    min_shapes: Shapes | None = _option("smallest shapes of the optimisation profile", of=_RUN)
    opt_shapes: Shapes | None = _option("its usual shapes", of=_RUN)
    max_shapes: Shapes | None = _option("its largest shapes", of=_RUN)
    report: Path | None = _option("where the outcome goes as JSON", words=("json",))
    fail_on: Literal["warning", "error"] | None = _option("findings that make it exit with 1", of=("scan",))


@dataclass(frozen=True)
class Key:
    """One option, as files and the environment know it.

    Attributes:
        name: Its field of `Settings`.
        kind: Its type, without `None`.
        text: What it is.
        of: The commands that read it.
        check: Raises `UsageError` or `ValueError` for a value of the right type that makes no sense.
        words: What users may call it; for hints.
    """

    name: str
    kind: Any
    default: Any
    text: str
    of: tuple[Command, ...]
    check: Callable[[Any], object] | None
    words: tuple[str, ...]

    @property
    def key(self) -> str:
        """As in a file: `keep-fp32`."""
        return self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """As in the environment: `REWRITER_KEEP_FP32`."""
        return PREFIX + self.name.upper()


def _keys() -> dict[str, Key]:
    hints = get_type_hints(Settings)
    return {f.name: Key(f.name, _some(hints[f.name]), f.default, **f.metadata) for f in fields(Settings)}


def _some(kind: Any) -> Any:
    """`X` of `X | None`."""
    kinds = get_args(kind)
    return next(k for k in kinds if k is not NoneType) if NoneType in kinds else kind


KEYS: dict[str, Key] = _keys()
"""Every option by the name of its field, in the order of the fields."""
