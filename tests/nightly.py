"""What `make nightly` alone runs (REWRITER_NIGHTLY=1), and how much larger it runs the rest."""

import os
from collections.abc import Iterable

NIGHTLY = os.environ.get("REWRITER_NIGHTLY") == "1"

ALONE = (
    "hooks/test_hooks_libraries.py::TestLightning",
    "hooks/test_hooks_libraries.py::TestOptimum",
    "hooks/test_hooks_libraries.py::TestUltralytics",
    "hooks/test_hooks_page.py",
    "hooks/test_hooks_precommit.py::test_installed_hooks",
    "hooks/test_hooks_precommit.py::test_the_manifest_s_hooks",
    "house/test_batch_page.py::test_a_command_of_the_page_runs",
    "house/test_batch_page.py::test_the_action",
    "house/test_contributing.py",
    "house/test_install.py::test_the_light_install",
    "house/test_package.py",
    "house/test_pages.py::test_a_command_runs",
    "house/test_pages.py::test_quoted_output",
    "house/test_site.py",
    "house/test_troubleshooting.py",
    "report/test_page_in_browser.py",
)
"""Starts of ids within tests/: real libraries of hooks, the wheel, the site, commands of pages, the action,
Chromium, and CONTRIBUTING.md followed in a copy of the project.
A file that is named on pytest's command line runs by day, too."""


def sized(usual: int, nightly: int) -> int:
    """The number of examples of this run."""
    return nightly if NIGHTLY else usual


def some(first: str, *others: str) -> list[str]:
    """One model by day, all at night: what is tested is the same, and a build costs seconds."""
    return [first, *others] if NIGHTLY else [first]


LARGE = ("convnext", "rtdetr", "swin", "vit", "vit_massive")
"""Case models of which each step costs seconds."""


def small(names: Iterable[str]) -> list[str]:
    """The case models but the large ones by day, all at night."""
    return [name for name in names if NIGHTLY or name not in LARGE]
