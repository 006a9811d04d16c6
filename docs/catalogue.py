"""Writes the pages that are made from the code: `python -m docs.catalogue`.

With `--check` it changes nothing, and fails if one of them is stale.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rewriter.base.errors import SEVERITIES
from rewriter.hazards.analysis import KINDS, Kind
from rewriter.passes import PURPOSES
from rewriter.passes.simplify import OPTIMIZERS
from rewriter.pipeline.catalogue import exactness_text, page, settings, summary
from rewriter.pipeline.options import COMMANDS, KEYS
from rewriter.pipeline.presets import OTHERWISE, PRESETS
from rewriter.pipeline.schema import Option, declarations, expected, to_text
from rewriter.pipeline.text import own_passes
from rewriter.report.explain import OTHER_RULES
from rewriter.target import quirks
from rewriter.target.probes import recorded

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Write the pages; with `--check` compare them instead: 0 if all are fresh, 1 if one is stale."""
    stale = False
    for name, make in PAGES.items():
        path = root / name
        now = path.read_text(encoding="utf-8") if path.is_file() else ""
        if now == make(now):
            continue
        if "--check" in arguments:
            sys.stderr.write(f"{path} is stale: run `python -m docs.catalogue`\n")
            stale = True
        else:
            path.write_text(make(now), encoding="utf-8")
    return int(stale)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    first, *others = [f"| {' | '.join(row)} |" for row in [head, *escaped]]
    return "\n".join([first, "|" + "---|" * len(head), *others])


# -- passes/README.md ---------------------------------------------------------------------------------

_PASSES = """\
# The passes

Written by `python -m docs.catalogue` from the passes themselves: change them, not this page.

{groups}

## Presets

{presets}

{pages}"""


_SIMPLIFIERS = """
onnxsim folds constants, and runs these of its optimizers: {}.
"""


def passes() -> str:
    """passes/README.md."""
    kinds = own_passes()
    groups = [
        f"## {title}\n\n"
        + _table(
            ("pass", "FP32 result", "why"),
            [(f"[{n}](#{n})", exactness_text(kinds[n].exactness), summary(kinds[n])) for n in names.split()],
        )
        for title, names in PURPOSES.items()
    ]
    pages = {name: page(kind) for name, kind in kinds.items()}
    pages["simplify"] += _SIMPLIFIERS.format(", ".join(f"`{name}`" for name in sorted(OPTIMIZERS)))
    presets = "\n".join(f"- `{n}`: {preset.summary}.\n  `{preset.pipeline}`" for n, preset in PRESETS.items())
    filled = _PASSES.format(groups="\n\n".join(groups), presets=presets, pages="\n".join(pages.values()))
    return filled.rstrip() + "\n"


# -- docs/trt11-migration.md --------------------------------------------------------------------------

_MIGRATION = """\
# From `trtexec --fp16` to TensorRT 11

Written by `python -m docs.catalogue`; edit `rewriter/pipeline/presets.toml`.
`rewriter presets show trt11-migrate` prints the same.

{about}

The preset sets {settings}. Its pipeline is `trt-fp16` without the passes
that rewrite products for faster or more accurate kernels ([accuracy.md](accuracy.md)).

{table}

The removed flags: [NVIDIA's migration guide]({source}).
NVIDIA's tool is AutoCast: [comparison.md](comparison.md) compares it.
[recipes.md](recipes.md) has the steps from the export to the engine, project by project.
"""


def migration() -> str:
    """docs/trt11-migration.md."""
    preset = PRESETS["trt11-migrate"]
    rows = [(", ".join(f"`{flag}`" for flag in old.split(", ")), now) for old, now in preset.table]
    table = _table(("up to TensorRT 10", "with TensorRT 11"), rows)
    return _MIGRATION.format(about=preset.about, settings=settings(preset), table=table, source=preset.source)


# -- docs/findings.md ---------------------------------------------------------------------------------

_FINDINGS = """\
# Every finding of scan, and every rule of a plan

Written by `python -m docs.catalogue`, from the rules themselves. Each finding of `scan` begins with its kind;
in a plan the same word is the rule. `rewriter rule overflow` prints its cause, a picture and what helps;
`rewriter why NODE fixed.onnx` explains a node of a result.
[hazards.md](hazards.md) has the measurements for the rules about the inside of operators.

## Kinds of hazard

The table has the usual severity; evidence in the data raises or lowers it. An error gives wrong results on
your samples. A warning gives wrong results on other data, or slightly wrong ones. A note is information.
“Measured” findings come from the ranges of your samples; on random data they are warnings at most.
“FP32: `fix` does” means that `rewriter fix` keeps these nodes in FP32.

{kinds}

## Rules that are no hazards

A plan keeps these nodes out of FP16 as well. [accuracy.md](accuracy.md) has the measurements behind “free”.

{rules}

## Known defects of TensorRT

If the target has a defect, `fix --target` repairs it if *what helps* says `fix`, and warns otherwise.
The release and the GPU come from `--target` (`10.13`, `10.13 sm_110`, `jetpack-6.2`) or from the machine.
If one of them is unknown, `scan` has a note, and `rewriter probe --ask` measures it.
*Asked* is the answer of TensorRT-RTX 1.6.1; the rest is from the linked threads.

{defects}
"""


def findings() -> str:
    """docs/findings.md."""
    kinds = [_kind(name, KINDS[name]) for name in sorted(KINDS, key=_place)]
    rules = [(f"`{name}`", why) for name, why in OTHER_RULES.items()]
    return _FINDINGS.format(
        kinds=_table(("kind", "meaning", "severity", "remedy"), kinds),
        rules=_table(("rule", "why"), rules),
        defects=_table(("defect", "releases", "asked", "what helps"), map(_defect, quirks.table())),
    )


def _place(name: str) -> tuple[int, str]:
    """Errors first, then by name."""
    return -SEVERITIES.index(KINDS[name].severity), name


def _kind(name: str, kind: Kind) -> tuple[str, ...]:
    severity = f"{kind.severity}, measured" if kind.measured else kind.severity
    return (
        f"`{name}`",
        kind.title,
        severity,
        kind.repair.replace("keep these nodes in FP32: `rewriter fix`", "FP32: `fix`"),
    )


def _defect(quirk: quirks.Quirk) -> tuple[str, ...]:
    name = f"[`{quirk.id}`]({quirk.link})" if quirk.link else f"`{quirk.id}` ({quirk.source})"
    helps = f"`fix`: {quirk.remedy}" if quirk.repaired else quirk.remedy
    return f"{name}: {quirk.title}", quirk.releases, _asked(quirk.answer), helps


def _asked(name: str) -> str:
    """The recorded answers to a probe, each with its GPUs: `wrong (H100, H200)`."""
    answers: dict[str, list[str]] = {}
    for found in sorted(recorded(), key=lambda found: found.gpu):
        if name in found.values:
            answers.setdefault(found.values[name], []).append(found.gpu.split()[1])
    return "; ".join(f"{value} ({', '.join(gpus)})" for value, gpus in answers.items())


# -- docs/configuration.md --------------------------------------------------------------------------

BEGIN, END = "<!-- keys: written by `python -m docs.catalogue` -->\n", "<!-- end of keys -->\n"


def with_keys(page: str) -> str:
    """The page with a fresh table between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"docs/configuration.md lacks {BEGIN.strip()} or {END.strip()}")
    return before + BEGIN + keys() + END + after


def keys() -> str:
    """A row for every key: its type, its default, the commands that read it, and what it does."""
    return _table(("key", "type", "default", "read by", "meaning"), map(_row, KEYS.values())) + "\n"


def _row(key: Option) -> tuple[str, ...]:
    default = key.default if key.default is not None else OTHERWISE.get(key.name)
    shown = "none" if default in (None, (), {}) else f"`{to_text(default)}`"
    readers = [command for command, kind in COMMANDS.items() if key.name in declarations(kind)]
    return f"`{key.key}`", expected(key.kind), shown, ", ".join(readers), key.text


PAGES: Mapping[Path, Callable[[str], str]] = {
    Path("passes", "README.md"): lambda _: passes(),
    Path("docs", "trt11-migration.md"): lambda _: migration(),
    Path("docs", "findings.md"): lambda _: findings(),
    Path("docs", "configuration.md"): with_keys,
}
"""Files of a checkout; each is made from what it holds now."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
