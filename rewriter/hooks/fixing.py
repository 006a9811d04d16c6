"""Options of every hook; fixes exported and committed models in place, or keeps the plain one. No PyTorch."""

import ast
import glob
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx

from rewriter.base.errors import OutputError, RewriterError, UsageError, described
from rewriter.base.text import one_line
from rewriter.ir.graph import made_by
from rewriter.ir.model import Model, load, save, walk_nodes
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.pipeline.config import load as load_configuration
from rewriter.pipeline.options import RANDOM_DATA, FixOptions, combined
from rewriter.pipeline.schema import declarations
from rewriter.report.results import FixResult

Feeds = Callable[[Model], Iterable[Any] | None]
"""Returns samples for a model; None: `rewriter.fix` generates random data."""

OWN = frozenset({"in_place", "dry_run", "strict"})
"""Options of `rewriter.fix` that make no sense here: a file is replaced if its checks pass."""

SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata in which PyTorch's newer exporter lists the modules of a node, and its own name last."""


@dataclass(frozen=True)
class HookOptions:
    """How exports are fixed.

    Attributes:
        preset: Short for `fix={"preset": ...}`.
        fix: Arguments of `rewriter.fix`, such as `{"build": False, "keep_fp32": ["*/head/*"]}`. The others
            come from the environment and `[tool.rewriter]`, as on the command line.
        calibration: Samples for measuring ranges: an iterable of arguments of the model, such as a
            DataLoader, or of dicts of arrays by input. None: the example arguments of the export.
        samples: Most samples to use, since a DataLoader holds a whole data set.
        fp32_modules: Names or patterns of modules to keep in FP32, such as `encoder.norm`, with all inside.
        strict: Raise errors, instead of keeping the plain export with a warning.
        keep_raw: Keep the plain export beside the result, as `<name>.raw.onnx`.
        quiet: Print nothing; warnings are still issued.

    Raises:
        UsageError: `rewriter.fix` lacks an argument, or a hook has no use for it.
    """

    preset: str | None = None
    fix: Mapping[str, Any] = field(default_factory=dict)
    calibration: Iterable[Any] | None = None
    samples: int = 32
    fp32_modules: Sequence[str] = ()
    strict: bool = False
    keep_raw: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        names = [name for name in declarations(FixOptions) if name not in OWN]
        for name in self.fix:
            if name not in names:
                what = "it has no meaning in a hook" if name in OWN else "rewriter.fix has no such argument"
                hint = f"choose from {', '.join(names)}"
                raise UsageError(what, where=f"fix={{{name!r}: ...}}", hint=hint)
        if self.calibration is not None and self.fix.get("inputs") is not None:
            raise UsageError("samples are passed twice", where="calibration=", hint="remove fix['inputs']")
        if self.samples < 1:
            raise UsageError(f"it cannot be {self.samples}", where="samples=", hint="use at least one")


def require(module: str, package: str, hook: str) -> Any:
    """Returns a module that a hook needs; raises an ImportError that names its package for pip without."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.partition(".")[0] != error.name.partition(".")[0]:
            raise  # the library is installed, but a dependency of it is not
        what = f"{hook} needs {package}, which is not installed: pip install {package}"
        raise ImportError(what, name=error.name) from None


class FixWarning(UserWarning):
    """A model was exported but could not be fixed: the plain export is kept."""


class Unverified(RewriterError):
    """The fixed model failed its verification and was discarded."""


@dataclass(frozen=True)
class Fixed:
    """Result of one export."""

    path: Path | None = None  # the file; None if the export was not to a path
    result: FixResult | None = None  # of `rewriter.fix`; None if it failed
    error: Exception | None = None  # why it failed, in which case the file is the plain export
    raw: Path | None = None  # the plain export, if it was kept beside the fixed file
    program: Any = None  # the ONNXProgram of PyTorch's newer exporter: the plain export


def fix_file(path: Path, feeds: Feeds, options: HookOptions) -> Fixed:
    """Replace an exported file by the fixed one; if that fails, the file is unchanged."""
    raw = raw_path(path) if options.keep_raw else None
    return attempt(lambda: Fixed(path, fix_export(path, feeds, options), raw=raw), options, str(path), path)


def attempt(work: Callable[[], Fixed], options: HookOptions, where: str, path: Path | None = None) -> Fixed:
    """Do the work; errors become warnings that name `where`, or are raised if `strict` is set."""
    try:
        return work()
    except Exception as error:
        if options.strict:
            raise
        reason = str(error) if isinstance(error, RewriterError) else one_line(described(error))
        text = f"{one_line(where)} is the plain export, not fixed: {reason}"
        warnings.warn(text, FixWarning, stacklevel=4)
        return Fixed(path, error=error)


def fix_export(source: Path | onnx.ModelProto, feeds: Feeds, options: HookOptions) -> FixResult:
    """Fix a file in place, or a model in memory; raises Unverified, with the file unchanged."""
    from rewriter.api import fix
    from rewriter.report.fix import verdict_line

    arguments = {**({"preset": options.preset} if options.preset else {}), **options.fix}
    resolved = load_configuration().resolve(**{n: value for n, value in arguments.items() if n != "inputs"})
    with resolved.errors_name_sources():
        request, model = combined(FixOptions, None, {**resolved.arguments("fix"), **arguments}), load(source)
        inputs = request.inputs if options.calibration is None else None
        inputs = feeds(model) if inputs is None else inputs
        patterns = [f"{name}.*" for name in options.fp32_modules]
        nodes = [(node.name, f"{module_of(node)}.") for node in walk_nodes(model.proto.graph) if node.name]
        named = (glob.escape(node) for node, module in nodes if any(fnmatchcase(module, p) for p in patterns))
        keep = (*request.keep_fp32, *named)
        result = fix(source, options=replace(request, strict=False, inputs=inputs, keep_fp32=keep))
    tf32 = [gap.reason for gap in result.gaps if gap.kind == "tf32"]  # no hook builds with TF32 off
    if tf32 or (result.verdict is not None and not result.verdict.passed):
        failed = "; ".join(tf32 or [check.summary for check in result.checks if check.passed is False])
        what = f"the fixed model failed its verification: {failed or 'no check could be made'}"
        hint = "`rewriter fix` on the plain export has details; fix={'keep_fp32': [...]} may help"
        raise Unverified(what, hint=hint)
    if isinstance(source, Path):
        if options.keep_raw and model.external:
            save(model, raw_path(source))
        elif options.keep_raw:
            shutil.copyfile(source, raw_path(source))
        result.output = save(result.model, source)
    for sentence in (*resolved.messages(), *result.warnings, verdict_line(result)):
        say(sentence, options)
    return result


def module_of(node: onnx.NodeProto) -> str:
    """The name of the innermost module that a node was exported from; "" for the model itself."""
    scopes = next((item.value for item in node.metadata_props if item.key == SCOPES), "")
    with suppress(Exception):  # what others wrote there is no list of names
        return str(["", *ast.literal_eval(scopes)[:-1]][-1])
    path: list[str] = []
    for part in node.name.split("/")[1:-1]:  # "/blocks/blocks.0/norm/Pow" is of blocks.0.norm
        repeats = bool(path) and part.startswith(f"{path[-1]}.")
        path[-1:] = [part] if repeats else [*path[-1:], part]
    return ".".join(path)


def say(text: str, options: HookOptions) -> None:
    """Print for the user on stderr: stdout belongs to the training script."""
    if not options.quiet:
        print(one_line(f"rewriter: {text}"), file=sys.stderr, flush=True)  # noqa: T201


def raw_path(path: Path) -> Path:
    """Path of the plain export: `net.raw.onnx` beside `net.onnx`."""
    return path.parent / f"{path.stem}.raw{path.suffix}"


LFS = b"version https://git-lfs.github.com/spec/"
"""First line of a file that Git LFS has not fetched (Git LFS specification, v1)."""


def skipped(path: Path) -> str:
    """Why a file is skipped; "" if it is not.

    `rewriter` chose the types of a fixed model: a second run must change nothing, and a scan would report
    hazards that its Casts avoid. What is no model is the job's to report.
    """
    if path.stem.endswith(".raw"):
        return "skipped: it is the original of a fixed model"
    if path.is_file():
        with path.open("rb") as stream:
            if stream.read(len(LFS)) == LFS:
                return "skipped: Git LFS has not fetched it"
    with suppress(RewriterError):
        nodes = load(path).proto.graph.node
        return "already fixed" if any(made_by(node, (MixedPrecision.name,)) for node in nodes) else ""
    return ""


def fix_committed(path: Path, options: dict[str, Any]) -> bool:
    """Fixes a file in place, and keeps the original beside it; returns False if there was nothing to do.

    git ignores the original from then on, in this clone (info/exclude).

    Args:
        options: Options of `rewriter.fix`, except `build`: TensorRT's build is slow.

    Raises:
        RewriterError: it failed, or its verification did; the file is unchanged then.
    """
    raw, before = raw_path(path), path.read_bytes() if path.is_file() else b""
    if raw.exists():
        what = "it would be overwritten, and may be the only copy of another model"
        raise OutputError(what, where=raw, hint="move it away, or delete it")
    fix = {"build": False, **data_beside(path, options), **options}
    fix_export(path, lambda _model: None, HookOptions(fix=fix, keep_raw=True, quiet=True))
    changed = path.read_bytes() != before
    if not changed:
        raw.unlink()
    elif shutil.which("git") and _git(raw.parent, "check-ignore", "-q", "--", raw.name).returncode == 1:
        exclude = raw.parent / _git(raw.parent, "rev-parse", "--git-path", "info/exclude").stdout.strip()
        exclude.parent.mkdir(exist_ok=True)
        with exclude.open("a", encoding="utf-8") as stream:
            stream.write("*.raw.onnx\n")
    return changed


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)


def data_beside(path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Samples beside the model, such as `net.npz` beside `net.onnx`, unless options choose the data."""
    samples = path.parent / f"{path.stem}.npz"
    chosen = not options.keys().isdisjoint(("inputs", *RANDOM_DATA))
    return {"inputs": samples} if samples.is_file() and not chosen else {}
