"""Adds the pre-commit hooks and a `[tool.rewriter]` table to a repository, and nothing else.

Both files are edited as text by adding lines, which keeps comments, order and style.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rewriter.ir.errors import UsageError
from rewriter.ir.model import write_text

PRE_COMMIT, PYPROJECT = ".pre-commit-config.yaml", "pyproject.toml"
HOOKS = ("rewriter-scan", "rewriter-fix")
"""The first alone is the default; `edits` puts a fix before the scan, which would stop the commit."""

TABLE = """\
[tool.rewriter]
preset = "trt-fp16"
"""

_REPOS = re.compile(r"^repos:[ \t]*(?P<rest>[^#\n]*?)[ \t]*(?:#.*)?$", re.MULTILINE)
_TOP_LEVEL = re.compile(r"^(?![\s#-])\S", re.MULTILINE)
_ID = re.compile(r"""^[ \t]*(?:-[ \t]+)?id:[ \t]*['"]?(?P<id>[\w-]+)""", re.MULTILINE)
_ITEM = re.compile(r"^(?P<indent>[ \t]*)-[ \t]+\S", re.MULTILINE)


@dataclass(frozen=True)
class FileEdit:
    """A file with its text before and after; None before if the file is new."""

    path: Path
    before: str | None
    after: str

    @property
    def diff(self) -> str:
        """Unified diff, as `git diff` shows it."""
        name = self.path.name
        old = "/dev/null" if self.before is None else f"a/{name}"
        lines = difflib.unified_diff(
            (self.before or "").splitlines(keepends=True),
            self.after.splitlines(keepends=True),
            old,
            f"b/{name}",
        )
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def repository(start: Path) -> Path:
    """Returns the git repository that contains a folder.

    Raises:
        UsageError: no repository contains it.
    """
    for folder in (start.resolve(), *start.resolve().parents):
        if (folder / ".git").exists():
            return folder
    raise UsageError("not in a git repository", where=str(start), hint="git init, or cd into the repository")


def edits(
    folder: Path, hooks: Sequence[str] = HOOKS[:1], *, url: str = "", revision: str = ""
) -> list[FileEdit]:
    """Returns the edits that a repository needs; empty if it has everything.

    Args:
        hooks: Hooks to add, of `HOOKS`.
        url, revision: Where pre-commit installs `rewriter` from. Without them it runs the installed
            `rewriter`, which needs no second environment.

    Raises:
        UsageError: lines cannot simply be added to a file.
    """
    configuration, project = _read(folder / PRE_COMMIT), _read(folder / PYPROJECT)
    missing = [hook for hook in sorted(hooks) if not _mentions(configuration or "", hook)]
    first = HOOKS[0] not in missing  # a scan is there already
    found = []
    if missing:
        entry = _remote_entry(missing, url, revision) if url else _local_entry(missing)
        found.append(
            FileEdit(
                folder / PRE_COMMIT, configuration, _with_entry(configuration, entry, folder, first=first)
            )
        )
    if not _has_table(project, folder):
        found.append(FileEdit(folder / PYPROJECT, project, _appended(project, TABLE)))
    return found


def apply(changes: Sequence[FileEdit]) -> None:
    """Write the files; a file that cannot be written is unchanged.

    Raises:
        OutputError: a file cannot be written.
    """
    for change in changes:
        windows = change.path.is_file() and b"\r\n" in change.path.read_bytes()
        write_text(change.after, change.path, "it", newline="\r\n" if windows else "\n")


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise UsageError(f"it is not UTF-8: {error}", where=str(path), hint="save it as UTF-8") from error


def _mentions(text: str, hook: str) -> bool:
    return any(match["id"] == hook for match in _ID.finditer(text))


def _local_entry(hooks: Sequence[str]) -> list[str]:
    lines = ["- repo: local", "  hooks:"]
    for hook in hooks:
        lines += [
            f"  - id: {hook}",
            f"    name: {hook.replace('-', ' ')}",
            f"    entry: rewriter hook {hook.removeprefix('rewriter-')}",
            "    language: system",
            r"    files: \.onnx$",
            "    require_serial: true",
        ]
    return lines


def _remote_entry(hooks: Sequence[str], url: str, revision: str) -> list[str]:
    if not revision:
        raise UsageError("pre-commit needs a revision, too", where="--repo", hint="add --rev TAG")
    return [f"- repo: {url}", f"  rev: {revision}", "  hooks:", *(f"  - id: {hook}" for hook in hooks)]


def _with_entry(text: str | None, entry: Sequence[str], folder: Path, *, first: bool) -> str:
    """Returns the configuration with an item added to `repos`, indented like the others: first, or last."""
    text = text or ""
    opening = _REPOS.search(text)
    if opening is None:
        return _appended(text, "repos:\n" + "".join(f"{line}\n" for line in entry))
    if opening["rest"] not in ("", "[]"):
        raise UsageError(
            "its repos are a list in brackets, which is not edited as text",
            where=str(folder / PRE_COMMIT),
            hint="write one item per line, or add by hand:\n" + "\n".join(entry),
        )
    head, body = text[: opening.end()], text[opening.end() :]
    if opening["rest"]:
        head = text[: opening.start("rest")].rstrip() + text[opening.end("rest") : opening.end()]
    following = _TOP_LEVEL.search(body)
    items, tail = (body[: following.start()], body[following.start() :]) if following else (body, "")
    item = _ITEM.search(items)
    added = "".join(f"{item['indent'] if item else ''}{line}\n" for line in entry)
    if first:
        return f"{head}\n{added}{body.removeprefix(chr(10))}"
    kept = items[: _last_line_of_items(items)]
    between = items[len(kept) :].removeprefix("\n") if tail else ""
    return f"{head}{kept}\n{added}{between}{tail}"


def _last_line_of_items(text: str) -> int:
    """End of the last item; unindented comments after it belong to the next key."""
    ends = [match.end() for match in re.finditer(r"^(?!#)[^\n]*\S[^\n]*$", text, re.MULTILINE)]
    return ends[-1] if ends else 0


def _has_table(text: str | None, folder: Path) -> bool:
    try:
        tool = tomllib.loads(text or "").get("tool", {})
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"it is not TOML: {error}", where=str(folder / PYPROJECT), hint="repair it first"
        ) from error
    return "rewriter" in tool


def _appended(text: str | None, addition: str) -> str:
    """Returns the text with an addition after an empty line."""
    kept = (text or "").rstrip()
    return f"{kept}\n\n{addition}" if kept else addition
