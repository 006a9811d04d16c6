"""CONTRIBUTING.md is true: a pass added as it says passes the contract tests and shows in the catalogue."""

import re
import shutil
from pathlib import Path

import pytest
from command_lines import python
from paths import ROOT

PAGE = ROOT / "CONTRIBUTING.md"
COPIED = ("rewriter", "tests", "docs", "models", "pyproject.toml", "README.md")


def examples() -> dict[str, str]:
    """The files that the page shows, by their paths."""
    found = re.findall(
        r"^`([\w/.]+\.(?:py|txt))`:\n\n```(?:python)?\n(.*?)^```$", PAGE.read_text(), re.M | re.S
    )
    return dict(found)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the example pass added, step by step."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, copy / name)
    (copy / "passes").symlink_to("rewriter/passes")
    for path, text in examples().items():
        assert not (ROOT / path).exists()
        (copy / path).parent.mkdir(exist_ok=True)
        (copy / path).write_text(text)
    listed = copy / "rewriter/passes/__init__.py"
    text = listed.read_text()
    listed.write_text(re.sub(r"(\"Cleans up .*\n *)", r"\1drop-double-neg ", text))
    run(copy, "-m", "docs.catalogue")
    return copy


def run(folder: Path, *arguments: str) -> str:
    done = python(*arguments, cwd=folder, PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_shows_a_pass_and_its_test() -> None:
    text = "tests/passes/text/drop_double_neg"
    assert list(examples()) == [
        "rewriter/passes/drop_double_neg.py",
        f"{text}/becomes.txt",
        f"{text}/stays.txt",
    ]


def test_the_example_keeps_the_contract_and_its_own_test(checkout: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-k", "drop-double-neg or drop_double_neg or lists_every_pass"]
    tests = ["tests/passes/test_every_pass.py", "tests/passes/test_text.py"]
    assert " passed" in run(checkout, "-m", "pytest", *options, *tests)


def test_the_catalogue_and_the_command_line_show_it(checkout: Path) -> None:
    assert "drop-double-neg" in (checkout / "passes/README.md").read_text()
    shown = run(checkout, "-m", "rewriter", "passes", "show", "drop-double-neg")
    assert "a score was turned into a loss" in " ".join(shown.split())


def test_the_example_is_in_house_style(checkout: Path) -> None:
    files = [str(checkout / path) for path in examples() if path.endswith(".py")]
    run(checkout, "-m", "ruff", "check", *files)
    run(checkout, "-m", "ruff", "format", "--check", *files)
