"""Every error that a user can meet says what to do about it."""

import ast
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

BASE = "RewriterError"


def sources() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "rewriter").rglob("*.py")}


def classes(trees: dict[Path, ast.Module]) -> dict[str, ast.ClassDef | None]:
    """The names of the base and of all classes below it, with their definitions."""
    defined = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found: dict[str, ast.ClassDef | None] = {BASE: None}
    while new := [
        node
        for node in defined
        if node.name not in found and any(isinstance(b, ast.Name) and b.id in found for b in node.bases)
    ]:
        found |= {node.name: node for node in new}
    return found


def others(tree: ast.Module, known: dict[str, ast.ClassDef | None]) -> set[str]:
    """Names that mean something else in a module: reports have an `OutputError` too."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    foreign = {a.asname or a.name for n in imports if "error" not in (n.module or "") for a in n.names}
    own = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return foreign | {node.name for node in own if known.get(node.name) is not node}


def constructor(node: ast.ClassDef | None) -> ast.FunctionDef | None:
    """A class's own `__init__`, which gives the hint itself."""
    own = (f for f in (node.body if node else ()) if isinstance(f, ast.FunctionDef))
    return next((f for f in own if f.name == "__init__"), None)


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call, with the last part of the name that is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            yield function.id if isinstance(function, ast.Name) else getattr(function, "attr", ""), node


def has_hint(call: ast.Call) -> bool:
    """True if a call has the keyword `hint` that is neither None nor empty."""
    empty = (ast.Constant(None), ast.Constant(""))
    given = [word.value for word in call.keywords if word.arg == "hint"]
    return bool(given) and ast.dump(given[0]) not in {ast.dump(value) for value in empty}


def test_every_error_has_a_hint() -> None:
    trees = sources()
    known = classes(trees)
    assert len(known) > 8, "the classes of errors were found"
    without = []
    for path, tree in trees.items():
        ours = known.keys() - others(tree, known)
        for name, call in calls(tree):
            if name in ours and constructor(known[name]) is None and not has_hint(call):
                without.append(f"{path.relative_to(ROOT)}:{call.lineno} {name}")
    for name, node in known.items():
        own = constructor(node)
        if own is not None and not any(has_hint(c) for called, c in calls(own) if called == "__init__"):
            without.append(f"{name}.__init__")
    assert without == []
