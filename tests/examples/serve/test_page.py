"""The chat page in a browser: it streams, stops, shows errors, and writes no HTML of a model's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .servers import Server, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("no chromium on PATH: apt-get install chromium", allow_module_level=True)
pytest.importorskip("playwright", reason="no Playwright: pip install playwright")

from playwright.sync_api import expect, sync_playwright  # noqa: E402 - only if it is there


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("page"), delay=0.005) as found:
        yield found


@pytest.fixture
def page(own: Server) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        found = browser.new_page()
        problems: list[str] = []
        found.on("pageerror", lambda error: problems.append(str(error)))
        found.goto(own.url("/"))
        expect(found.locator("#model")).to_have_text("fake")
        yield found
        browser.close()
        assert problems == []


def test_a_chat(page: Page) -> None:
    page.fill("#most", "20")
    page.fill("#temperature", "0")
    page.fill("#text", "hello <b>you</b>")
    page.press("#text", "Enter")
    expect(page.locator(".user")).to_have_text("hello <b>you</b>")
    expect(page.locator("#figures")).to_contain_text("20 tokens")
    assert page.locator(".assistant").inner_text()
    page.fill("#text", "again")
    page.click("#send")
    expect(page.locator(".assistant")).to_have_count(2)
    expect(page.locator("#send")).to_be_enabled()
    assert page.locator(".error").count() == 0
    page.click("#clear")
    assert page.locator("#chat > *").count() == 0


def test_stop_frees_what_was_held(page: Page, own: Server) -> None:
    page.fill("#most", "480")
    page.fill("#text", "long")
    page.click("#send")
    expect(page.locator(".assistant")).not_to_have_text("")
    page.click("#stop")
    expect(page.locator("#send")).to_be_enabled()
    own.wait_for(own.is_empty)


def test_an_error_is_shown(page: Page) -> None:
    page.fill("#most", "1000")
    page.fill("#text", "too long")
    page.click("#send")
    expect(page.locator(".error")).to_contain_text("more than this model's context")


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = (Path(__file__).parents[3] / "examples/serve/front/page.html").read_text()
    assert "http" not in text.replace("http-equiv", "")
