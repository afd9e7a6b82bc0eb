"""The built pages in a browser, wide and narrow, light and dark. ``hatch run docs:browser``."""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .snippets import generator

pytestmark = pytest.mark.site

SITE = Path(__file__).resolve().parents[2] / "site"
PAGES = sorted(str(path.parent.relative_to(SITE)) for path in SITE.rglob("index.html"))
WIDTHS = (400, 1280)
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

# What a reader would stumble over, measured where it is drawn.
LOOK = r"""() => {
  const parse = text => (text.match(/[\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(
    v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4
  ).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = node => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.9) return colour;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const node of document.querySelectorAll("article p, article li, article td, article h2")) {
    if (!node.textContent.trim() || !node.offsetParent) continue;
    const pair = [light(parse(getComputedStyle(node).color)), light(behind(node))];
    pair.sort((x, y) => y - x);
    if ((pair[0] + 0.05) / (pair[1] + 0.05) < 4.5) faint.push(node.textContent.slice(0, 40));
  }
  const inside = node => {
    for (let at = node.parentElement; at && at !== document.body; at = at.parentElement) {
      if (["auto", "scroll", "hidden"].includes(getComputedStyle(at).overflowX)) return true;
    }
    return false;
  };
  const cut = [...document.querySelectorAll("article *")].filter(
    node => node.offsetParent && node.getBoundingClientRect().right > innerWidth + 1
      && !inside(node)
  ).map(node => node.tagName + " " + node.textContent.slice(0, 40));
  return {
    over: document.documentElement.scrollWidth - innerWidth,
    cut, faint,
    paper: light(behind(document.body)),
    words: document.querySelector("article").innerText.length,
  };
}"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    assert PAGES, "the site is not built: hatch run docs:build"

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    assert path is not None, "Chromium is not installed: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_can_be_read(browser: Any, address: str, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    requests: list[str] = []
    page = context.new_page()
    page.on("request", lambda request: requests.append(request.url))
    problems = {}
    for name in PAGES:
        page.goto(f"{address}/{name}/")
        found = page.evaluate(LOOK)
        bright = found["paper"] > 0.5
        if found["over"] > 0 or found["cut"] or found["faint"] or bright is (scheme == "dark"):
            problems[name] = found
        assert found["words"] > 200, name
    context.close()
    assert not problems
    assert all(url.startswith(address) for url in requests), "something was fetched from elsewhere"


def test_a_page_that_cannot_be_read_is_found(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 400, "height": 900})
    page.goto(f"{address}/vllm/")
    page.add_style_tag(content="article p { min-width: 900px; color: #ccc !important; }")
    found = page.evaluate(LOOK)
    page.close()
    assert found["over"] > 0
    assert found["cut"]
    assert found["faint"]


def test_a_wide_table_scrolls_in_its_own_box(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 400, "height": 900})
    page.goto(f"{address}/vocabulary/")
    wide = page.evaluate(
        """() => [...document.querySelectorAll(".md-typeset__scrollwrap")].filter(
          box => box.scrollWidth > box.clientWidth
        ).map(box => { box.scrollLeft = 50; return box.scrollLeft; })"""
    )
    page.close()
    assert wide
    assert set(wide) == {50}


def test_a_code_longer_than_the_page_scrolls_in_its_own_box(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 400, "height": 900})
    page.goto(f"{address}/values/")
    wide = page.evaluate(
        """() => [...document.querySelectorAll("pre code")].filter(
          box => box.scrollWidth > box.clientWidth && getComputedStyle(box).overflowX === "auto"
        ).length"""
    )
    page.close()
    assert wide > 3


def test_the_toggle_changes_the_palette(browser: Any, address: str) -> None:
    page = browser.new_page(color_scheme="light")
    page.goto(address)
    schemes = []
    for _ in range(3):
        schemes.append(page.evaluate("document.body.getAttribute('data-md-color-scheme')"))
        page.locator("form[data-md-component=palette] label:not([hidden])").click()
    page.close()
    assert set(schemes) == {"default", "slate"}


def test_a_search_finds_a_value(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(address)
    query = page.locator("input[data-md-component=search-query]")
    found = page.locator(".md-search-result__item a")
    for _ in range(30):
        if found.count() > 1:
            break
        # What is typed before the page listens is lost.
        query.fill("")
        query.fill("attention_probabilities")
        page.wait_for_timeout(2_000)
    assert found.count() > 1
    page.close()


def test_every_public_name_is_in_the_reference() -> None:
    pages = generator()
    for module in pages.PACKAGES:
        page = (SITE / "reference" / pages.MODULES[module] / "index.html").read_text()
        for name in pages.exported(module):
            assert f'id="{module}.{name}"' in page or f"{module}.{name}" in pages.MODULES, name


def test_nothing_is_named_that_lies_elsewhere() -> None:
    """Scripts, styles, images and fonts are the site's own."""
    remote = {}
    for name in PAGES:
        text = (SITE / name / "index.html").read_text()
        found = re.findall(r"<(?:script|img|iframe)[^>]*src=\"(?:https?:)?//[^\"]+", text)
        found += re.findall(r"<link[^>]*rel=\"?(?:stylesheet|preconnect)[^>]*https?://[^>]+", text)
        if found:
            remote[name] = found
    assert not remote
    for style in SITE.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?https?://", style.read_text()), style.name
