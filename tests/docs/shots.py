"""Look at the built site in a browser: what is wrong on a page, and a small grey picture of it.

    python -m tests.docs.shots FOLDER

writes screenshots into the folder, and the small pictures anew into the file that the test compares
with. Look at the screenshots before you commit it.
"""

from __future__ import annotations

import base64
import functools
import http.server
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[2]
REFERENCES = Path(__file__).with_name("shots.json")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

PAGES = {
    "home": "",
    "tutorial": "tutorials/huggingface/",
    "api": "reference/api/program/",
    "benchmarks": "benchmarks/",
}
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}
COLUMNS, ROWS = 16, 12
"""Of the grey picture."""

_INSPECT = """() => {
  const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const paint = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const grounds = (element) => {
    const found = [];
    for (let e = element; e; e = e.parentElement)
      found.unshift(getComputedStyle(e).backgroundColor);
    return ["white", ...found];
  };
  const faint = [];
  const walker = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || element.closest("svg, .headerlink, .md-clipboard, script, style")) continue;
    if (!element.checkVisibility()) continue;
    const ground = grounds(element);
    const ink = [...ground, getComputedStyle(element).color];
    const both = [paint(ground), paint(ink)].map(luminance);
    const contrast = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    if (contrast < 4.5) faint.push([text.slice(0, 30), element.className, contrast.toFixed(2)]);
  }
  const images = [...document.querySelectorAll("article img")];
  return {
    ground: luminance(paint(grounds(document.querySelector("article")))),
    wider: document.documentElement.scrollWidth - window.innerWidth,
    broken: images.filter(i => !i.complete || !i.naturalWidth).map(i => i.src),
    images: images.length,
    faint,
    headings: document.querySelectorAll("article h1").length,
  };
}"""

_GREY = """async ([data, columns, rows]) => {
  const image = new Image();
  image.src = "data:image/png;base64," + data;
  await image.decode();
  const canvas = new OffscreenCanvas(columns, rows).getContext("2d");
  canvas.imageSmoothingQuality = "high";
  canvas.drawImage(image, 0, 0, columns, rows);
  const pixels = canvas.getImageData(0, 0, columns, rows).data;
  return Array.from({length: columns * rows}, (_, i) =>
    Math.round(0.3 * pixels[4 * i] + 0.59 * pixels[4 * i + 1] + 0.11 * pixels[4 * i + 2]));
}"""


@dataclass(frozen=True)
class Shot:
    """One page in one look.

    Attributes:
        png: the upper part of the page, as large as the window.
        grey: its brightness in `ROWS` times `COLUMNS` fields, 0 to 255, row by row.
        ground: luminance of the page's ground, 0 to 1.
        wider: pixels by which the page is wider than the window.
        images, broken: how many pictures it has, and the addresses of those that did not load.
        faint: texts with a contrast below 4.5 (WCAG 2 AA), their class, and their contrast.
        headings: of the first level.
        problems: errors of scripts, and requests within the site that failed.
    """

    png: bytes
    grey: list[int]
    ground: float
    wider: int
    images: int
    broken: list[str]
    faint: list[list[str]]
    headings: int
    problems: list[str]


@contextmanager
def built_site() -> Iterator[str]:
    """Build the site, and serve it on this machine; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", folder],
            cwd=ROOT,
            check=True,
        )
        handler = functools.partial(_Quiet, directory=folder)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}/"
            finally:
                server.shutdown()
                thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def take(browser: Browser, site: str, page: str, look: str) -> Shot:
    """Open a page in one look, and examine it."""
    context = browser.new_context(**LOOKS[look], reduced_motion="reduce")
    try:
        tab = context.new_page()
        problems: list[str] = []
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("requestfailed", lambda request: problems.append(f"{request.url} failed"))
        tab.goto(f"{site}{PAGES[page]}", wait_until="networkidle")
        png = tab.screenshot()
        found = tab.evaluate(_INSPECT)
        data = base64.b64encode(png).decode()
        grey = tab.evaluate(_GREY, [data, COLUMNS, ROWS])
        inside = [problem for problem in problems if "://" not in problem or site in problem]
        return Shot(png, grey, problems=inside, **found)
    finally:
        context.close()


def main() -> None:
    """Write all screenshots, and the references that the test compares with."""
    from playwright.sync_api import sync_playwright

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    references = {}
    with built_site() as site, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for page in PAGES:
            for look in LOOKS:
                shot = take(browser, site, page, look)
                (folder / f"{page}-{look}.png").write_bytes(shot.png)
                references[f"{page}-{look}"] = bytes(shot.grey).hex()
                print(page, look, shot.wider, shot.broken, shot.faint[:12], shot.problems)
        browser.close()
    REFERENCES.write_text(json.dumps(references, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
