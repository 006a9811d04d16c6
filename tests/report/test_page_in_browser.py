"""Pages in a real browser: they render, sort and filter, obey the keyboard, and ask for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pages
import pytest
from browser import needs_chromium, opened, running
from pages import HOSTILE

from rewriter.engines.probe.answers import recorded
from rewriter.report import html

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = needs_chromium

RESULTS: dict[str, Callable[[], Any]] = {
    "fix": pages.fixed,
    "scan": pages.scanned,
    "verify": pages.verified,
    "locate": pages.located,
    "probe": lambda: recorded()[0],
    "recorded": recorded,
}

NAMES = Path(__file__).with_name("names.js").read_text(encoding="utf-8")
CONTRAST = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running() as browser:
        yield browser


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file with the page of every command."""
    folder = tmp_path_factory.mktemp("pages")
    for verb, made in RESULTS.items():
        html.write(made(), folder / f"{verb}.html", f"rewriter {verb} model.onnx --report report.html")
    return {verb: folder / f"{verb}.html" for verb in RESULTS}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("verb", RESULTS)
def test_a_page_renders_with_contrast_and_names_for_everything(
    browser: Browser, written: dict[str, Path], verb: str, scheme: str
) -> None:
    with opened(browser, written[verb], color_scheme=scheme) as page:
        assert page.locator("h1").inner_text()
        assert page.locator("main > section").count() >= 2
        assert page.evaluate(NAMES) == []
        assert page.evaluate(CONTRAST) == []
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(20, 23, 26)") == (scheme == "dark")


@pytest.mark.parametrize("verb", RESULTS)
def test_nothing_is_wider_than_a_telephone(browser: Browser, written: dict[str, Path], verb: str) -> None:
    with opened(browser, written[verb], viewport={"width": 380, "height": 800}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 380


def test_a_table_sorts_by_numbers_and_by_text(browser: Browser, written: dict[str, Path]) -> None:
    with opened(browser, written["probe"]) as page:
        table = page.locator("table").first
        head = table.locator("th").first
        head.locator("button").click()
        names = table.locator("tbody tr td:first-child").all_inner_texts()
        assert head.get_attribute("aria-sort") == "ascending"
        assert names == sorted(names) and len(set(names)) > 10
        head.locator("button").click()
        assert table.locator("tbody tr td:first-child").all_inner_texts() == names[::-1]
    with opened(browser, written["locate"]) as page:
        table = page.locator("#chain")
        page.get_by_role("button", name="Error", exact=True).first.focus()
        page.keyboard.press("Enter")
        shown = [float(text) for text in table.locator("tbody tr td:nth-child(4)").all_inner_texts()]
        assert shown == sorted(shown, reverse=True) and shown[0] > shown[-1]


def test_a_table_filters_by_text_and_by_choice(browser: Browser, written: dict[str, Path]) -> None:
    with opened(browser, written["locate"]) as page:
        rows = page.locator("#chain tbody tr")
        total = rows.count()
        page.get_by_label("Filter", exact=True).first.fill("/body/c")
        assert 0 < rows.locator("visible=true").count() < total
        assert f"of {total} rows" in page.locator("[data-count]").first.inner_text()
        page.get_by_label("Filter", exact=True).first.fill("")
        page.get_by_label("Operator").first.select_option("Conv")
        visible = [row for row in rows.all() if row.is_visible()]
        assert visible and all("Conv" in row.inner_text() for row in visible)


def test_the_keyboard_walks_along_the_depth_and_to_the_hazard(
    browser: Browser, written: dict[str, Path]
) -> None:
    with opened(browser, written["fix"]) as page:
        field = page.get_by_role("slider")
        page.get_by_role("button", name="all").focus()
        page.keyboard.press("Tab")
        assert field.get_attribute("aria-valuenow") == "1"
        first = field.get_attribute("aria-valuetext")
        page.keyboard.press("ArrowRight")
        assert field.get_attribute("aria-valuenow") == "2"
        assert field.get_attribute("aria-valuetext") != first
        page.keyboard.press("End")
        assert field.get_attribute("aria-valuenow") == field.get_attribute("aria-valuemax")
        page.keyboard.press("Home")
        page.keyboard.press("h")
        assert "far" in str(field.get_attribute("aria-valuetext"))
        assert "exceed" in page.locator(".tip .why").inner_text()
        page.keyboard.press("h")
        assert HOSTILE in page.locator(".tip").inner_text()
        page.keyboard.press("Escape")
        assert not page.locator(".tip").is_visible()


def test_the_pointer_shows_the_node_under_it(browser: Browser, written: dict[str, Path]) -> None:
    with opened(browser, written["scan"]) as page:
        box = page.locator(".field").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 2, box["y"] + box["height"] / 2)
        assert "/body/c0" in page.locator(".tip").inner_text()
        page.locator("[data-zoom='0.5']").click()
        assert float(page.locator(".data").evaluate("e => e.viewBox.baseVal.width")) <= 12


def test_pictures_are_shown(browser: Browser, written: dict[str, Path]) -> None:
    for verb in ("fix", "verify"):
        with opened(browser, written[verb]) as page:
            sizes: list[Any] = page.locator(".images img").evaluate_all("all => all.map(i => i.naturalWidth)")
            assert sizes == [32, 32, 32]


def test_it_prints_on_white_without_controls(browser: Browser, written: dict[str, Path]) -> None:
    with opened(browser, written["fix"], color_scheme="dark") as page:
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not page.locator(".tools").is_visible()
        assert page.evaluate(CONTRAST) == []
        assert page.pdf(format="A4").startswith(b"%PDF")
