"""Pages in a real browser: they render, sort and filter, obey the keyboard, and ask for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pages
import pytest
from browser import needs_chromium, opened, running
from pages import HOSTILE

from rewriter.report import html

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = needs_chromium

RESULTS: dict[str, Callable[[], Any]] = {
    "fix": pages.fixed,
    "scan": pages.scanned,
    "verify": pages.verified,
    "locate": pages.located,
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


CHARTS = ".depth, .strip, svg.errors, .graph svg"  # all that shows figures as a drawing


def heard(page: Page, selector: str) -> list[tuple[str, str]]:
    """Role and name of every element of a selector, as Chromium gives them to a screen reader."""
    tool = page.context.new_cdp_session(page)
    root = tool.send("DOM.getDocument")["root"]["nodeId"]
    found = tool.send("DOM.querySelectorAll", {"nodeId": root, "selector": selector})["nodeIds"]
    said = []
    for one in found:
        (node,) = tool.send("Accessibility.getPartialAXTree", {"nodeId": one, "fetchRelatives": False})[
            "nodes"
        ]
        said.append((node["role"]["value"], node.get("name", {}).get("value", "")))
    tool.detach()
    return said


@pytest.mark.parametrize("verb", RESULTS)
def test_a_screen_reader_gets_all_of_a_page(browser: Browser, written: dict[str, Path], verb: str) -> None:
    with opened(browser, written[verb]) as page:
        charts, tables, regions = (heard(page, one) for one in (CHARTS, "table", "main > section"))
        assert charts or verb != "fix"
        assert all(role in ("figure", "image") for role, _ in charts)
        assert [name for _, name in charts if not any(c.isdigit() for c in name)] == []
        texts = page.locator(".depth figcaption").all_inner_texts()
        assert all("exceed" in text and "largest value" in text for text in texts)
        assert tables and all(role == "table" for role, _ in tables) and len(set(tables)) == len(tables)
        assert all(role == "columnheader" for role, _ in heard(page, "th"))
        assert page.locator("[data-count][aria-live=polite]").count() == len(tables)
        outline = page.locator("body").aria_snapshot()
        roles = [line.strip("- ").partition(" ")[0].rstrip(":") for line in outline.splitlines()]
        assert (roles.count("banner"), roles.count("main"), roles.count("navigation")) == (1, 1, 1)
        assert roles.index("banner") < roles.index("navigation") < roles.index("main")
        titles = page.locator("main h2").all_inner_texts()
        assert regions == [("region", title) for title in titles] and len(set(titles)) == len(titles)
        assert page.locator("nav a").all_inner_texts() == titles
        _tab_through(page)
        assert all(name for _, name in heard(page, "img, .field, table, th, [data-met]"))


def _tab_through(page: Page) -> None:
    """Tab goes down the page, from the link to its content on; what it meets is marked with `data-met`."""
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.hash") == "#main"
    page.evaluate("window.met = [document.activeElement]")
    for _ in range(500):
        page.keyboard.press("Tab")
        if page.evaluate("met.includes(document.activeElement) || document.activeElement === document.body"):
            break
        page.evaluate("met.push(document.activeElement)")
    assert page.evaluate("met.length") > 5
    follows = "met[i - 1].compareDocumentPosition(e) & Node.DOCUMENT_POSITION_FOLLOWING"
    assert page.evaluate(f"met.every((e, i) => !i || {follows})")
    page.evaluate("met.forEach(e => e.setAttribute('data-met', ''))")


def test_copying_is_announced_and_buttons_are_named(browser: Browser, written: dict[str, Path]) -> None:
    with opened(browser, written["fix"]) as page:
        names = [name for _, name in heard(page, "[data-copy]")]
        assert names and len(set(names)) == len(names)
        page.locator("[data-copy]").first.click()
        page.wait_for_function("document.querySelector('.command output').textContent")
        assert page.locator(".command output").first.text_content() in ("Copied", "Selected")


def test_a_table_sorts_and_filters_and_says_so(browser: Browser, written: dict[str, Path]) -> None:
    with opened(browser, written["locate"]) as page:
        table, said = page.locator("#chain-table"), page.locator("#chain [data-count]")
        rows, filter_ = table.locator("tbody tr"), page.get_by_label("Filter", exact=True).first
        head = table.locator("th").first
        head.locator("button").click()
        names = table.locator("tbody tr td:first-child").all_inner_texts()
        assert head.get_attribute("aria-sort") == "ascending"
        assert names == sorted(names) and len(set(names)) > 3
        head.locator("button").click()
        assert table.locator("tbody tr td:first-child").all_inner_texts() == names[::-1]
        page.get_by_role("button", name="Error", exact=True).first.focus()
        page.keyboard.press("Enter")
        shown = [float(text) for text in table.locator("tbody tr td:nth-child(4)").all_inner_texts()]
        assert shown == sorted(shown, reverse=True) and shown[0] > shown[-1]
        filter_.fill("/body/c")
        assert 0 < rows.locator("visible=true").count() < rows.count()
        assert said.inner_text().endswith(f"of {rows.count()} rows, by Error, descending")
        filter_.fill("")
        page.get_by_label("Operator").first.select_option("Conv")
        visible = [row for row in rows.all() if row.is_visible()]
        assert visible and all("Conv" in row.inner_text() for row in visible)


def test_the_keyboard_walks_along_the_depth(browser: Browser, written: dict[str, Path]) -> None:
    with opened(browser, written["fix"]) as page:
        field = page.get_by_role("slider")
        page.get_by_role("button", name="Zoom in").focus()
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


def test_the_hazard_key_does_nothing_without_hazards(browser: Browser, tmp_path: Path) -> None:
    html.write(pages.fixed(large=2.0), tmp_path / "fix.html")
    with opened(browser, tmp_path / "fix.html") as page:
        assert page.locator("[data-hazard]").count() == 0
        page.get_by_role("slider").focus()
        before = page.get_by_role("slider").get_attribute("aria-valuetext")
        for key in ("h", "H"):
            page.keyboard.press(key)
        assert page.get_by_role("slider").get_attribute("aria-valuetext") == before


COLLISIONS = """() => [...document.querySelectorAll(".graph svg")].flatMap((svg) => {
  const values = [...svg.querySelectorAll("text.at")].filter((text) => text.textContent);
  const others = [...values, ...svg.querySelectorAll(".body")];
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const box = (element) => element.getBoundingClientRect();
  return values.flatMap((value) => others.filter((other) => other !== value && meet(box(value), box(other))))
    .map((element) => element.textContent);
})"""


def test_values_in_a_graph_meet_no_box_and_no_value(browser: Browser, written: dict[str, Path]) -> None:
    with opened(browser, written["fix"]) as page:
        assert page.locator(".graph .at").count() > 3
        assert page.evaluate(COLLISIONS) == []


def test_the_pointer_shows_the_node_under_it(browser: Browser, written: dict[str, Path]) -> None:
    with opened(browser, written["fix"]) as page:
        page.locator(".field").scroll_into_view_if_needed()
        box = page.locator(".field").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 2, box["y"] + box["height"] / 2)
        assert "/body/c0" in page.locator(".tip").inner_text()
        page.locator("[data-zoom='0.5']").click()
        assert float(page.locator(".data").evaluate("e => e.viewBox.baseVal.width")) <= 12


def test_pictures_are_shown(browser: Browser, written: dict[str, Path]) -> None:
    for verb, count in (("fix", 5), ("verify", 3)):
        with opened(browser, written[verb]) as page:
            sizes: list[Any] = page.locator(".images img").evaluate_all("all => all.map(i => i.naturalWidth)")
            assert sizes == [32] * count
    with opened(browser, written["fix"]) as page:
        captions = page.locator(".images figcaption").all_inner_texts()
        assert captions[:4] == ["Input x", "Original in FP32", "Plain FP16", "Fixed"]


def test_the_graph_of_a_cause_is_reached_from_its_sentence_the_plan_and_the_chart(
    browser: Browser, written: dict[str, Path]
) -> None:
    with opened(browser, written["fix"]) as page:
        assert 3 < page.locator("#cause-1 .box").count() <= 10
        for place in ("header", "#plan"):
            page.locator(f"{place} .to-graph").first.click()
            assert page.locator("#cause-1:target").is_visible()
        page.get_by_role("slider").focus()
        page.keyboard.press("h")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "cause-1"


def test_every_button_does_something(browser: Browser, written: dict[str, Path]) -> None:
    for verb in RESULTS:
        with opened(browser, written[verb]) as page:
            assert page.locator("button:disabled").count() == 0
            for button in page.locator("button:visible:not([data-copy])").all():
                before = page.locator("body").evaluate("e => e.outerHTML")
                button.click()
                assert page.locator("body").evaluate("e => e.outerHTML") != before, button.inner_text()


@pytest.mark.parametrize("verb", RESULTS)
def test_a_telephone_is_wide_enough(browser: Browser, written: dict[str, Path], verb: str) -> None:
    with opened(browser, written[verb], viewport={"width": 380, "height": 800}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 380
        reason = page.locator("td.text").first.bounding_box() if verb == "fix" else None
        assert reason is None or (reason["x"] >= 0 and reason["x"] + reason["width"] <= 380)


def test_long_names_stay_on_a_telephone(browser: Browser, tmp_path: Path) -> None:
    html.write(pages.fixed(prefix=pages.LONG), tmp_path / "fix.html")
    with opened(browser, tmp_path / "fix.html", viewport={"width": 390, "height": 800}) as page:
        assert pages.LONG in page.locator("main").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_it_prints_on_white_without_controls(browser: Browser, written: dict[str, Path]) -> None:
    with opened(browser, written["fix"], color_scheme="dark") as page:
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not page.locator(".tools").is_visible()
        assert page.evaluate(CONTRAST) == []
        assert page.pdf(format="A4").startswith(b"%PDF")
