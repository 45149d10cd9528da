"""The built site in a browser: four kinds of pages, on light and on dark, and on a phone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from .shots import CHROMIUM, LOOKS, PAGES, REFERENCES, Shot, built_site, take

pytestmark = pytest.mark.slow
if CHROMIUM is None:
    pytest.skip("no chromium on PATH: apt-get install chromium", allow_module_level=True)
pytest.importorskip("playwright", reason="no Playwright: pip install playwright")
pytest.importorskip("mkdocs", reason="no MkDocs: pip install '.[docs]'")

from playwright.sync_api import sync_playwright  # noqa: E402 - only if it is there

NAMES = [f"{page}-{look}" for page in PAGES for look in LOOKS]
MEAN, MOST = 12.0, 110.0
"""How far fields may be from the reference, of 255: in the mean, and the farthest.

Words that change move fields a little, and the fonts of another machine a little more. A page
without its navigation, in other colours or without its style is farther away:
`test_a_broken_page_is_seen`.
"""


@pytest.fixture(scope="module")
def shots() -> Iterator[dict[str, Shot]]:
    with built_site() as site, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield {f"{p}-{look}": take(browser, site, p, look) for p in PAGES for look in LOOKS}
        browser.close()


def difference(one: list[int], other: list[int]) -> tuple[float, int]:
    """The mean and the largest difference of two grey pictures."""
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return sum(apart) / len(apart), max(apart)


def reference(name: str) -> list[int]:
    return list(bytes.fromhex(json.loads(REFERENCES.read_text("utf-8"))[name]))


@pytest.mark.parametrize("name", NAMES)
def test_a_page_fits_its_window_and_is_whole(shots: dict[str, Shot], name: str) -> None:
    shot = shots[name]
    assert shot.wider <= 0, "the page can be scrolled sideways"
    assert shot.broken == []
    assert shot.problems == []
    assert shot.headings == 1


@pytest.mark.parametrize("name", NAMES)
def test_all_text_can_be_read(shots: dict[str, Shot], name: str) -> None:
    shot = shots[name]
    assert shot.faint == []
    assert shot.ground < 0.05 if name.endswith("dark") else shot.ground > 0.9


@pytest.mark.parametrize("name", NAMES)
def test_a_page_looks_as_before(shots: dict[str, Shot], name: str) -> None:
    mean, most = difference(shots[name].grey, reference(name))
    again = "look at the page, then: python -m tests.docs.shots FOLDER"
    assert mean <= MEAN, again
    assert most <= MOST, again


def test_pictures_are_among_what_was_looked_at(shots: dict[str, Shot]) -> None:
    assert shots["benchmarks-light"].images > 0


def test_a_broken_page_is_seen(shots: dict[str, Shot]) -> None:
    """The tolerance tells looks apart, and a page without its style from one with it."""
    light, dark = reference("home-light"), reference("home-dark")
    assert difference(light, dark)[0] > MEAN
    blank = [255] * len(light)
    assert difference(light, blank)[0] > MEAN
