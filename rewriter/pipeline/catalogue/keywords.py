"""Writes `pipeline/keywords.py`: the keywords of the API as type checkers and editors read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from rewriter.pipeline.options import JOBS
from rewriter.pipeline.schema import declarations

HEAD = '''\
"""Keywords of `rewriter.fix`, `scan` and `verify`. Generated from `pipeline/options.py`: change that.

`python -m rewriter.pipeline.catalogue` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, Literal, TypedDict

from rewriter.hazards import Rule
from rewriter.ir.base import Pass
from rewriter.ir.plan import InputsOutputs, Plan, Precision
from rewriter.pipeline.options import Runner
from rewriter.pipeline.schema import AnyPath, Names, Paths, Shapes
from rewriter.runtime.figures.tolerances import Tolerance
'''


def module() -> str:
    """The module's text: one TypedDict for each class of options."""
    return HEAD + "".join("\n".join(_class(command, kind)) for command, kind in JOBS.items())


def _class(command: str, kind: type) -> Iterator[str]:
    yield f"\n\nclass {command.title()}Keywords(TypedDict, total=False):"
    yield f'    """Keywords of `rewriter.{command}`: the fields of `{kind.__name__}`."""\n'
    types = {field.name: str(field.type).replace("'", '"') for field in fields(kind)}
    yield from (f"    {name}: {types[name]}" for name in declarations(kind))
    yield ""
