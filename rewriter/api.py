"""The verbs as `import rewriter` offers them: the jobs, with messages in the words of Python.

Jobs are called by commands and by Python alike, and their messages name options as a command line has them.
Here `--keep-fp32 '*/head/*'` becomes `keep_fp32='*/head/*'`, in errors and in the sentences of results. A
keyword that a verb lacks is an error that names the closest one.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, cast, get_args, get_origin

from rewriter.engines.deployment import ENGINES
from rewriter.errors import RewriterError, UsageError
from rewriter.jobs.compare_inputs import compare_inputs as compare_inputs_job
from rewriter.jobs.fix.api import fix as fix_job
from rewriter.jobs.locate import locate as locate_job
from rewriter.jobs.probe import probe as probe_job
from rewriter.jobs.scan import scan as scan_job
from rewriter.jobs.verify import verify as verify_job
from rewriter.pipeline.declaration import Declaration, declarations
from rewriter.pipeline.option_types import fitted, type_hints, unknown_keyword
from rewriter.pipeline.options import JOBS
from rewriter.pipeline.run import run

__all__ = ["compare_inputs", "fix", "in_python_words", "locate", "probe", "run_passes", "scan", "verify"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_OPTIONS: Mapping[str, Declaration] = {
    option.flag: option for kind in reversed(tuple(JOBS.values())) for option in declarations(kind).values()
}
_OTHERS = {
    f"--{name.replace('_', '-')}": name for name in ("marks", "max_builds", "samples", "images", "again")
}
_NAMED = re.compile(
    r"(?<![\w-])--(?P<no>no-)?(?P<name>[a-z][a-z0-9-]*)"
    r"(?P<value>[ =](?:[A-Z]+\b|'[^']*'|[\w./:*?%+-]*[\w/*%]))?"
)
_SHAPE = re.compile(r"^(?P<name>.+):(?P<sizes>\d+(?:x\d+)*)$")
_NUMBER = re.compile(r"^-?\d+(?:\.\d+)?(?:e-?\d+)?%?$")


def in_python_words(text: str) -> str:
    """A message with options as keywords; what is a whole command, such as `rewriter fix x --y`, stays."""
    if text in _OPTIONS:
        return f"{_OPTIONS[text].name}="
    return "".join(
        part
        if part.startswith("`") or "rewriter " in part.partition("--")[0][-80:]
        else _NAMED.sub(_keyword, part)
        for part in re.split(r"(`[^`]*`)", text)
    )


def _keyword(match: re.Match[str]) -> str:
    flag, value = f"--{match['name']}", (match["value"] or "")
    name = _OPTIONS[flag].name if flag in _OPTIONS else _OTHERS.get(flag)
    if name is None:
        return match[0]
    kind = _OPTIONS[flag].kind if flag in _OPTIONS else int
    if kind is bool:
        return f"{name}={not match['no']}{value}"
    written = _written(name, kind, value[1:])
    return f"{name}={written}" if written else f"{name}={value}"


def _written(name: str, kind: Any, value: str) -> str:
    """The value of an option as Python writes it; "" where the word after the option is not its value."""
    shape = _SHAPE.match(value)
    if name.endswith("shapes") and shape:
        sizes = shape["sizes"].split("x")
        return f"{{{shape['name']!r}: ({', '.join(sizes)}{',' * (len(sizes) == 1)})}}"
    if value.startswith("'") or value.isupper() or (kind in (int, float) and _NUMBER.match(value)):
        return value
    words = get_args(kind) if get_origin(kind) is Literal else ENGINES if name == "engine" else ()
    return repr(value) if value in words or any(c in value for c in "*/") else ""


@contextmanager
def _python_words() -> Iterator[None]:
    try:
        yield
    except RewriterError as error:
        error.what = in_python_words(error.what)
        error.where = None if error.where is None else in_python_words(error.where)
        error.hint = None if error.hint is None else in_python_words(error.hint)
        raise


def _verb(job: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The job as a verb of the API: arguments are checked by its annotations first."""
    signature = inspect.signature(job)
    takes_options = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())

    @wraps(job)
    def verb(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with _python_words():
            if not takes_options:  # the job itself checks those of an options class
                for name in kwargs:
                    if name not in signature.parameters:
                        raise unknown_keyword(name, {known: known for known in signature.parameters})
            _require_share(kwargs.get("max_latency_cost"))
            hints = type_hints(job)
            for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
                if not takes_options or name == "output":
                    fitted(value, hints[name], f"{name}=")
            return cast(Result, _in_keywords(job(*args, **kwargs)))

    return verb


def _require_share(cost: Any) -> None:
    """Asks what a whole number means, as the command line does: 20 may be 20 % or 20 times."""
    if isinstance(cost, (int, float)) and not isinstance(cost, bool) and 1.0 <= cost < math.inf:
        hint = (
            f"{cost / 100:g} is {cost:g} % more latency; if you mean {cost:g} times the latency, "
            f"give options=rewriter.FixOptions(max_latency_cost={cost - 1:g})"
        )
        raise UsageError(f"it cannot be {cost:g}", where="max_latency_cost=", hint=hint)


SENTENCES = frozenset(
    "warnings notes repairs conclusion summary limit remedy remarks verdict checks details findings reason "
    "repair samples arrays causes done tolerance source data text passes refusals".split()
)
"""Fields of results that hold sentences for people, or parts that do."""


def _in_keywords(value: Any) -> Any:
    """A result with its sentences in the words of Python; all else in it are the same objects."""
    if isinstance(value, str):
        return in_python_words(value)
    if type(value) in (list, tuple):
        return type(value)(map(_in_keywords, value))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    old = {field.name: getattr(value, field.name) for field in fields(value) if field.name in SENTENCES}
    new = {name: _in_keywords(part) for name, part in old.items()}
    return replace(value, **new) if new != old else value


fix = _verb(fix_job)
scan = _verb(scan_job)
verify = _verb(verify_job)
locate = _verb(locate_job)
compare_inputs = _verb(compare_inputs_job)
probe = _verb(probe_job)
run_passes = _verb(run)
