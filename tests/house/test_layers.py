"""Imports point one way, and `import rewriter` stays light."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from command_lines import python
from paths import ROOT

PACKAGE = ROOT / "rewriter"

TABLE = re.findall(
    r"^\| `(\w+)(?:/|\.py)` \| .* \| ([\d,]+) \|$", (ROOT / "docs/architecture.md").read_text("utf-8"), re.M
)
"""Rooms and the most lines of Python in each, from docs/architecture.md."""

ROOMS = tuple(name for name, _ in TABLE)
"""From the ground up: a room imports from itself and from those before it."""

BUDGETS = {name: int(lines.replace(",", "")) for name, lines in TABLE}

APART = ({"runtime", "hazards"},)
"""Rooms that do not import each other, though one of them comes first."""

HEAVY = tuple(
    "onnxruntime onnxsim scipy onnx_graphsurgeon polygraphy tensorrt tensorrt_rtx ray torch cuda".split()
)
LIGHT_IMPORT_SECONDS = 0.3


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    """The room that a file belongs to: its top-level module or package below `rewriter`."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@cache
def imported(path: Path) -> list[tuple[str, bool]]:
    """Modules that a file imports, and whether it does so when it is imported itself."""
    return list(_imported(ast.parse(path.read_text(encoding="utf-8"))))


def _imported(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Constant) and (named := NAMED.match(str(node.value))):
            yield named[1], False
        elif isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "rewriter":
                yield from ((f"rewriter.{alias.name}", id(node) not in inside) for alias in node.names)
            else:
                yield node.module, id(node) not in inside


NAMED = re.compile(rf"(rewriter\.(?:{'|'.join(ROOMS)})(?:\.\w+)*)(?::[\w.]+)?$")
"""A module, or a part of one, as `pkgutil.resolve_name` takes it."""

HEIGHT = {name: height for height, name in enumerate(ROOMS)}


def test_every_room_has_its_place() -> None:
    assert {room(path) for path in modules()} - {"__init__"} == HEIGHT.keys()


def test_no_room_outgrows_its_budget() -> None:
    lines: dict[str, int] = dict.fromkeys(ROOMS, 0)
    for path in modules():
        if room(path) != "__init__":
            lines[room(path)] += len(path.read_text(encoding="utf-8").splitlines())
    over = {name: count - BUDGETS[name] for name, count in lines.items() if count > BUDGETS[name]}
    assert over == {}, "lines above the budget: shorten, or raise it and say in the commit what they buy"


def test_imports_point_down() -> None:
    upward = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in modules()
        if room(path) != "__init__"
        for name, _ in imported(path)
        if name.startswith("rewriter.") and name != "rewriter.__version__"
        if HEIGHT[name.split(".")[1]] > HEIGHT[room(path)] or {name.split(".")[1], room(path)} in APART
    ]
    assert upward == []


def test_heavy_libraries_load_when_used() -> None:
    at_import = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in modules()
        for name, early in imported(path)
        if early and name.split(".")[0] in HEAVY
    ]
    assert at_import == []


def test_importing_rewriter_is_quick() -> None:
    code = "import time; s = time.process_time(); import rewriter; print(time.process_time() - s)"
    assert min(float(python("-c", code).stdout) for _ in range(3)) < LIGHT_IMPORT_SECONDS


def test_importing_the_api_loads_no_heavy_library() -> None:
    code = f"import sys, rewriter; rewriter.fix; print([m for m in {HEAVY} if m in sys.modules])"
    assert python("-c", code).stdout == "[]\n"


def test_public_names_load_on_demand() -> None:
    code = """
import sys, rewriter
assert "onnx" not in sys.modules
assert dir(rewriter) == sorted(rewriter.__all__)
for name in rewriter.__all__:
    getattr(rewriter, name)
try:
    rewriter.nothing
except AttributeError as error:
    print(error)
"""
    assert python("-c", code).stdout == "module 'rewriter' has no attribute 'nothing'\n"


def test_every_table_of_values_has_its_test() -> None:
    for path in (ROOT / "tests").glob("*/values.txt"):
        code = "".join(file.read_text(encoding="utf-8") for file in path.parent.glob("test_*.py"))
        sections = re.findall(r"^\[(\w+)\] ", path.read_text(encoding="utf-8"), re.M)
        assert [name for name in sections if f"def {name}(" not in code] == [], path
