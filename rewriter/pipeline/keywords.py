"""Keywords of `rewriter.fix` and others. Generated from `pipeline/options.py`: change that.

`python -m docs.catalogue` writes it.
"""

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, Literal, TypedDict

from rewriter.hazards import Rule
from rewriter.ir.plan import Plan, Precision
from rewriter.passes.base import Pass
from rewriter.pipeline.options import Runner, Tool
from rewriter.pipeline.schema import AnyPath, Names, Paths, Shapes
from rewriter.runtime.metrics.tolerances import Tolerance


class DataKeywords(TypedDict, total=False):
    """The fields of `DataOptions`."""

    inputs: Any
    input_shapes: Shapes | None
    input_values: dict[str, Any] | None
    seed: int


class EngineKeywords(TypedDict, total=False):
    """The fields of `EngineOptions`."""

    engine: Runner
    plugin_lib: Paths
    min_shapes: Shapes | None
    opt_shapes: Shapes | None
    max_shapes: Shapes | None


class FixKeywords(DataKeywords, EngineKeywords, total=False):
    """The fields of `FixOptions`."""

    in_place: bool
    dry_run: bool
    preset: str
    passes: str | Sequence[str | Pass | EllipsisType] | None
    add: str | Sequence[str | Pass]
    skip: Names
    refittable: bool
    opset: int | None
    target: str | None
    deploy: Tool | None
    precision: Precision | None
    io: str | None
    keep_fp32: Names
    keep_fp32_op: Names
    lower: Names
    lower_op: Names
    plugin_types: Names
    plan: AnyPath | Plan | None
    save_plan: AnyPath | None
    hazards: Sequence[Rule]
    tolerance: float | None
    max_latency_cost: float | None
    metric: str | None
    verify: bool
    build: bool
    accumulation: Literal["fp32", "fp16"] | None
    repair: bool
    repair_seconds: float
    strict: bool
    timeout: float
    page: bool


class ScanKeywords(DataKeywords, total=False):
    """The fields of `ScanOptions`."""

    precision: Literal["fp16", "bf16"]
    target: str
    hazards: Sequence[Rule]


class VerifyKeywords(DataKeywords, EngineKeywords, total=False):
    """The fields of `VerifyOptions`."""

    builds: int
    timeout: float
    tolerance: float | Tolerance | None
    metric: str
    accumulation: Literal["fp32", "fp16"] | None
    build: bool
    timing: bool


class LocateKeywords(DataKeywords, EngineKeywords, total=False):
    """The fields of `LocateOptions`."""

    timeout: float
    tolerance: float | None
