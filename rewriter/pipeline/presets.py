"""Presets: pipelines by name, with the options that go with them; `presets.toml` declares them.

A preset's values apply where the user sets none; `pipeline.config` defines the order.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from rewriter.base.errors import UsageError, nearest

if TYPE_CHECKING:
    from rewriter.ir.plan import Precision
    from rewriter.passes.base import Pass

OTHERWISE: Mapping[str, Any] = {
    "precision": "fp16",
    "io": "keep",
    "target": "tensorrt",
    "metric": "relative-l2",
}
"""Defaults of the options that presets may set."""

DEFAULT_OPSETS: Mapping[Precision, int] = {"fp16": 17, "fp32": 17, "bf16": 22}
"""17 has LayerNormalization, which every TensorRT since 8.6 maps; BF16 Conv exists from 22 on."""


@dataclass(frozen=True)
class Preset:
    """A named pipeline."""

    name: str
    summary: str  # one line without a full stop
    about: str
    pipeline: str
    defaults: Mapping[str, Any] = field(default_factory=dict)  # where the user sets nothing
    table: Sequence[tuple[str, str]] = ()  # old and new, for a preset that replaces something older
    source: str = ""  # the link of the table

    @cached_property
    def steps(self) -> tuple[Pass, ...]:
        from rewriter.pipeline.text import parse

        return parse(self.pipeline)

    @property
    def precision(self) -> Precision:
        """The type that the plan lowers the model to; fp32 keeps types unchanged."""
        chosen: Precision = self.choose("precision")
        return chosen

    def choose(self, option: str, given: Any = None) -> Any:
        """`given`; if that is None, the value of the preset, or else the default without a preset."""
        return given if given is not None else self.defaults.get(option, OTHERWISE.get(option))


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
EPILOGUES, _STRUCTURE = _TABLES.pop("epilogues"), _TABLES["structure-only"]["pipeline"]
for _table in _TABLES.values():
    _table["pipeline"] = _table["pipeline"].replace("...", _STRUCTURE).replace("\n", "")
PRESETS: Mapping[str, Preset] = {name: Preset(name, **table) for name, table in _TABLES.items()}
DEFAULT_PRESET = "trt-fp16"


def with_epilogues() -> tuple[Pass, ...]:
    """The passes of the default, with FP32 that costs nothing on some networks, and latency on others."""
    from rewriter.pipeline.text import parse

    return parse(EPILOGUES.replace("...", _STRUCTURE))


def pass_names() -> list[str]:
    """Every pass that a pipeline may name, for the shell; none is imported. Each has a file of its name."""
    files = (Path(__file__).parents[1] / "passes").glob("[!_]*.py")
    return sorted(file.stem.replace("_", "-") for file in files if file.stem != "base")


def summaries() -> Mapping[str, str]:
    """Every preset by name with its summary, for the shell."""
    return {preset.name: preset.summary for preset in PRESETS.values()}


def preset_named(name: str) -> Preset:
    """The preset of that name; raises UsageError if there is none."""
    if name not in PRESETS:
        hint = f"{nearest(name, PRESETS)}; `rewriter presets` lists them"
        raise UsageError(f"unknown preset {name!r}", option="preset", hint=hint)
    return PRESETS[name]


def select(
    preset: str = DEFAULT_PRESET,
    passes: str | Sequence[str | Pass | EllipsisType] | None = None,
    skip: Iterable[str] = (),
    add: str | Sequence[str | Pass | EllipsisType] = (),
) -> tuple[Pass, ...]:
    """Returns the passes of `preset`, or `passes` in its place, without those in `skip`, with those in `add`.

    Args:
        passes: A pipeline as text, or a list of such texts and passes; `...` inserts the preset's passes.
        add: As `passes`. Each replaces the pass of its name, or comes before the first of a later stage.

    Raises:
        UsageError: an unknown preset, pass or option, or something else than a pass.
    """
    from rewriter.pipeline.text import find, listed

    own = preset_named(preset).steps
    chosen = own if passes is None else listed(passes, own)
    dropped = {find(name.strip(), option="skip").name for name in skip}
    steps = [step for step in chosen if step.name not in dropped]
    for step in listed(add):
        same = [at for at, other in enumerate(steps) if other.name == step.name]
        later = [at for at, other in enumerate(steps) if other.stage > step.stage]
        at, end = (same[0], same[0] + 1) if same else ([*later, len(steps)][0],) * 2
        steps[at:end] = [step]
    return tuple(steps)
