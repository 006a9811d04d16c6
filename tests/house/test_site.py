"""The site: it builds without a warning, and its navigation has every page."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from paths import DOCS, ROOT

needs_mkdocs = pytest.mark.skipif(
    find_spec("mkdocs") is None or find_spec("material") is None or find_spec("mkdocstrings") is None,
    reason="MkDocs is not installed: pip install '.[docs]'",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


def build(configuration: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """`mkdocs build --strict`: dead links and anchors, and pages outside the navigation are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(configuration)]
    return subprocess.run(
        [*command, "--site-dir", str(target)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )


@needs_mkdocs
def test_every_page_is_on_the_site(site: Path) -> None:
    expected = {f"{path.stem}.html" for path in DOCS.glob("*.md")}
    outside = {"CONTRIBUTING.html", "CHANGELOG.html", "rewriter/passes/index.html", "benchmarks/index.html"}
    assert expected | outside | {"index.html", "images/report.png"} <= {
        path.relative_to(site).as_posix() for path in site.rglob("*")
    }


@needs_mkdocs
def test_the_home_page_is_the_readme_with_links_of_the_site(site: Path) -> None:
    home = (site / "index.html").read_text(encoding="utf-8")
    assert "make demo" in home
    assert 'href="troubleshooting.html"' in home and 'src="search.js"' in home
    assert 'src="images/report.png"' in home
    assert ".md" not in "".join(part.split('"')[0] for part in home.split('href="')[1:])


@needs_mkdocs
def test_the_api_page_shows_docstrings(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    assert 'id="rewriter.fix"' in page
    assert "Patterns of node or output names" in page  # an option, whose text is put into the docstring
