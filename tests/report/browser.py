"""The Chromium on PATH, for tests of pages; they are skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)

needs_chromium = pytest.mark.skipif(
    FOUND is None or find_spec("playwright") is None,
    reason=f"needs a browser on PATH ({', '.join(NAMES)}) and pip install playwright",
)


@contextmanager
def running() -> Iterator[Browser]:
    """One headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=FOUND, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, path: Path, **options: Any) -> Iterator[Page]:
    """A page that is shown without an error, a message on the console, or a request."""
    page = browser.new_page(**options)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on(
        "request",
        lambda request: (
            problems.append(f"request: {request.url[:80]}") if _leaves(request.url, path) else None
        ),
    )
    page.goto(path.as_uri())
    try:
        yield page
        assert problems == []
        assert page.evaluate("window.hacked") is None
    finally:
        page.close()


def _leaves(url: str, path: Path) -> bool:
    """True for a request of anything but the page itself and what it holds."""
    return not url.startswith("data:") and url.partition("#")[0] != path.as_uri()
