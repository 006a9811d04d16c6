"""Imports point one way, and `import rewriter` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rewriter"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("model",),
    ("facts", "kinds", "schemas", "stopwatch"),
    ("base", "plan"),
    ("edits",),
    ("engines", "heads", "kernels", "masks", "norms", "resizes", "splits", "stored", "windows"),
    ("norm_opset", "opsets", "ranges", "retype", "round_trips"),
    ("hazards", "rescaling", "rounding"),
    ("dot_products",),
    ("costs", "emulation", "epilogues", "islands", "mlp", "options", "plan_file", "planner", "prices"),
    ("activations", "pricing", "splitting"),
    ("plan_fit",),
    ("migration", "passes"),
    ("presets",),
    ("registry",),
    ("driver",),
    ("pipeline", "result"),
    ("builder_warnings", "deployment", "findings"),
    ("build_check", "compare", "inputs"),
    ("checks", "metrics", "weak_typing"),
    ("locate", "parity", "probe"),
    ("expectations", "search", "verification"),
    ("job", "report", "scanner"),
    ("api", "config"),
    ("catalogue", "hooks"),
    ("cli",),
    ("__main__",),
)
"""From the ground up: a module imports from its own layer or from one below."""

HEAVY = (
    "onnxruntime",
    "onnxsim",
    "scipy",
    "onnx_graphsurgeon",
    "polygraphy",
    "tensorrt",
    "tensorrt_rtx",
    "torch",
    "cuda",
)
LIGHT_IMPORT_SECONDS = 0.3


def modules() -> list[Path]:
    own = [path for path in PACKAGE.rglob("*.py") if "passes" not in path.relative_to(PACKAGE).parts]
    return sorted([*own, *(ROOT / "passes").glob("*.py")])


def room(path: Path) -> str:
    """The part of the package that a file belongs to: its module, or its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "passes" if parts[0] == "passes" else parts[1]


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """Modules that a file imports, and whether it does so when it is imported itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
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
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "rewriter":
                yield from ((f"rewriter.{alias.name}", id(node) not in inside) for alias in node.names)
            else:
                yield node.module, id(node) not in inside


HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}


def test_every_module_has_its_place() -> None:
    assert {room(path) for path in modules()} - {"__init__"} == HEIGHT.keys()


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    if room(path) == "__init__":
        return
    for name, _ in imported(path):
        if name.startswith("rewriter.") and name != "rewriter.__version__":
            other = name.split(".")[1]
            assert HEIGHT[other] <= HEIGHT[room(path)], f"{room(path)} imports {other}, which stands above it"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_libraries_load_when_used(path: Path) -> None:
    at_import = {name.split(".")[0] for name, early in imported(path) if early}
    assert not at_import.intersection(HEAVY)


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()


def test_importing_rewriter_is_quick() -> None:
    code = "import time; s = time.perf_counter(); import rewriter; print(time.perf_counter() - s)"
    assert min(float(python(code)) for _ in range(3)) < LIGHT_IMPORT_SECONDS


def test_importing_the_api_loads_no_heavy_library() -> None:
    code = f"import sys, rewriter; rewriter.fix; print([m for m in {HEAVY} if m in sys.modules])"
    assert python(code) == "[]"


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
    assert python(code) == "module 'rewriter' has no attribute 'nothing'"
