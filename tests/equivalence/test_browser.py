"""The page in a real browser: wide and narrow, light and dark. ``hatch run browser``."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

from .reports import agreeing, departing, in_bfloat16

pytestmark = pytest.mark.browser

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--hide-scrollbars",
)

# What a reader would stumble over, measured where it is drawn.
LOOK = """
<script>
const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(
  v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4
).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = node => {
  for (let at = node; at; at = at.parentElement) {
    const colour = parse(getComputedStyle(at).backgroundColor);
    if (colour.length === 3 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
};
const found = {width: innerWidth, wide: document.documentElement.scrollWidth, faint: [], tiny: []};
for (const node of document.querySelectorAll("main *")) {
  const own = [...node.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || node.tagName === "SCRIPT") continue;
  const style = getComputedStyle(node);
  const pair = [light(parse(style.color)), light(behind(node))].sort((x, y) => y - x);
  const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
  if (contrast < 4.5) found.faint.push([node.className, node.textContent.slice(0, 30), contrast]);
  if (parseFloat(style.fontSize) < 11.5) found.tiny.push(node.textContent.slice(0, 30));
}
found.paper = light(behind(document.body));
found.cells = document.querySelectorAll(".map td").length;
const out = document.createElement("pre");
out.id = "found";
out.textContent = JSON.stringify(found);
parent.document.body.append(out);
</script>
"""

# A window of Chromium's has a least width; a frame has none.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark">
<iframe style="border: 0; width: {width}px; height: 1500px" srcdoc="{page}"></iframe>
"""


def chromium() -> str:
    """The browser; without one these tests fail, and say what to install."""
    for name in CHROMIUM:
        if path := shutil.which(name):
            return path
    pytest.fail(f"none of {', '.join(CHROMIUM)} is installed: apt-get install chromium")


def run(page: Path, dark: bool, profile: Path, *arguments: str) -> str:
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [
        *(chromium(), *FLAGS, scheme, "--window-size=1400,1600"),
        *(f"--user-data-dir={profile}", *arguments, page.as_uri()),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("make", [agreeing, departing, in_bfloat16])
def test_the_page_can_be_read(make, width, dark, tmp_path):
    page = tmp_path / "page.html"
    inner = make().to_html().replace("</body>", LOOK + "</body>")
    page.write_text(FRAME.format(width=width, page=escape(inner)))
    dom = run(page, dark, tmp_path / "profile", "--dump-dom")
    found = json.loads(unescape(re.search(r'<pre id="found">(.*?)</pre>', dom, re.S).group(1)))
    assert found["width"] == width
    assert found["wide"] == width, "the page itself scrolls sideways"
    assert found["faint"] == []
    assert found["tiny"] == []
    assert found["cells"] == 30 * 12
    assert (found["paper"] < 0.1) == dark


def test_the_page_can_be_drawn(tmp_path):
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    departing().write(html=page)
    run(page, False, tmp_path / "profile", f"--screenshot={picture}")
    assert picture.stat().st_size > 50_000
