"""What pip installs: the package `rewriter` with its passes, and no top-level `passes`."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from command_lines import python
from paths import ROOT

import rewriter
from rewriter.pipeline.text import own_passes

FILES = ["LICENSE", "README.md", "pyproject.toml"]
FOLDERS = ["docs", "rewriter"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with an sdist, and the wheel that was built out of it, as on an index."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in FILES:
        shutil.copy2(ROOT / name, source)
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "build", "--quiet", "--no-isolation"]
    subprocess.run([*command, "--outdir", str(target), str(source)], check=True)
    return target


def expected() -> set[str]:
    """Every Python file of the checkout under the name that it is imported by."""
    return {p.relative_to(ROOT).as_posix() for p in (ROOT / "rewriter").rglob("*.py")}


def test_the_wheel_holds_everything_and_nothing_at_the_top(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {n for n in names if n.endswith(".py")} == expected()
    assert "rewriter/py.typed" in names
    templates = ("html/templates/page.html", "html/templates/page.js", "scripts/shell.template")
    assert {f"rewriter/report/{name}" for name in templates} <= names
    stem = f"rewriter-{rewriter.__version__}"
    assert {n.split("/")[0] for n in names} == {"rewriter", f"{stem}.dist-info"}


def test_the_sdist_holds_the_passes_once(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert "rewriter/passes/isolate_clip.py" in names and "LICENSE" in names
    assert len(names) == len(set(names))


def test_the_installed_wheel_runs_away_from_the_checkout(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel],
        check=True,
    )
    code = (
        "import importlib.util, rewriter.passes;"
        "print(rewriter.passes.__file__, importlib.util.find_spec('passes'), len(rewriter.passes.ALL))"
    )
    done = python("-P", "-c", code, cwd=tmp_path, PYTHONPATH=str(site), PATH="")
    where, top_level, count = done.stdout.split()
    assert Path(where).is_relative_to(site)
    assert top_level == "None"
    assert int(count) == len(own_passes())


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == rewriter.__version__
