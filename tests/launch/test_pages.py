"""The timeline page in a browser: what it draws, and that it can be zoomed, panned and asked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cg.launch.pictures.model import Picture, RankRow, TimeSlice, Track, WorkKind
from cg.launch.pictures.timeline_html import timeline_html
from cg.launch.pictures.tracks import stack

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("no chromium on PATH: apt-get install chromium", allow_module_level=True)
pytest.importorskip("playwright", reason="no Playwright: pip install playwright")

from playwright.sync_api import sync_playwright  # noqa: E402 - only if it is there

LONG = TimeSlice(
    10.0,
    40.0,
    WorkKind.FORWARD,
    "0F0 stage0.forward",
    "0",
    op="%h = call(%x) {fn = @stage0.forward}",
    source="train.py:12, in step",
    nbytes=8192,
    microbatch=0,
    execution=3,
)
PICTURE = Picture(
    "@step",
    (
        RankRow(
            0, (Track("compute", (LONG, TimeSlice(50.0, 100.0, WorkKind.BACKWARD, "0B0", "0"))),)
        ),
        RankRow(
            1,
            (
                Track("compute", ()),
                Track("recv", (TimeSlice(40.0, 42.0, WorkKind.MESSAGE, "recv"),)),
            ),
        ),
    ),
)


@pytest.fixture(scope="module")
def browser_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    file = tmp_path_factory.mktemp("page") / "timeline.html"
    file.write_text(timeline_html(PICTURE), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 500})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(file.as_uri())
        page.wait_for_selector("canvas[data-to]")
        yield page
        browser.close()
        assert problems == []


@pytest.fixture
def page(browser_page: Page) -> Page:
    """The page, showing all of the timeline."""
    browser_page.locator("#fit").click()
    browser_page.mouse.move(1, 1)
    wait_for_view(browser_page, lambda low, high: (low, high) == (0.0, 100.0))
    return browser_page


def canvas(page: Page) -> Locator:
    return page.locator("canvas")


def view(page: Page) -> tuple[float, float]:
    return tuple(float(canvas(page).get_attribute(f"data-{end}") or "") for end in ("from", "to"))  # type: ignore[return-value]


def wait_for_view(page: Page, right: object) -> tuple[float, float]:
    """The text that the page shows, once it is right."""
    assert callable(right)
    for _ in range(100):
        shown = view(page)
        if right(*shown):
            return shown
        page.wait_for_timeout(20)
    raise AssertionError(f"the page shows {shown}")


def at(page: Page, row: int, track: int, time: float) -> tuple[float, float]:
    """The point in the window of a time of a track."""
    low, high = view(page)
    given = {
        k: float(canvas(page).get_attribute(f"data-{k}") or "") for k in ("left", "width", "axis")
    }
    box = canvas(page).bounding_box()
    assert box is not None
    lane = stack(PICTURE)[row].lanes[track]
    x = given["left"] + (time - low) / (high - low) * given["width"]
    return box["x"] + x, box["y"] + given["axis"] + lane.top + lane.height / 2


def test_it_draws_boxes_in_their_colours(page: Page) -> None:
    assert colour(page, *at(page, 0, 0, 20.0)) == [0x3D, 0x74, 0xCC, 255]
    assert colour(page, *at(page, 0, 0, 90.0)) == [0xD0, 0x69, 0x2B, 255]


def colour(page: Page, x: float, y: float) -> object:
    """Of a point of the window."""
    return canvas(page).evaluate(
        """(canvas, [x, y]) => {
            const box = canvas.getBoundingClientRect(), ratio = canvas.width / box.width;
            const pen = canvas.getContext("2d");
            return [...pen.getImageData((x - box.left) * ratio, (y - box.top) * ratio, 1, 1).data];
        }""",
        [x, y],
    )


def test_the_wheel_zooms_around_the_pointer(page: Page) -> None:
    x, y = at(page, 0, 0, 25.0)
    page.mouse.move(x, y)
    page.mouse.wheel(0, -240)
    low, high = wait_for_view(page, lambda low, high: high - low < 99)
    assert 0 < low < 25 < high < 100
    assert at(page, 0, 0, 25.0)[0] == pytest.approx(x, abs=1)
    page.mouse.wheel(0, 2000)
    page.mouse.wheel(0, 2000)
    wait_for_view(page, lambda low, high: high - low > 99)


def test_dragging_pans(page: Page) -> None:
    page.mouse.move(*at(page, 0, 0, 30.0))
    page.mouse.wheel(0, -240)
    low, high = wait_for_view(page, lambda low, high: high - low < 99)
    x, y = at(page, 0, 0, 30.0)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 40, y, steps=4)
    page.mouse.up()
    moved, end = wait_for_view(page, lambda left, _: left > low)
    assert end - moved == pytest.approx(high - low)
    assert at(page, 0, 0, 30.0)[0] == pytest.approx(x - 40, abs=1)
    page.mouse.dblclick(x, y)
    wait_for_view(page, lambda low, high: (low, high) == (0.0, 100.0))


def test_hovering_tells_op_source_bytes_and_stream(page: Page) -> None:
    tip = page.locator("#tip")
    assert not tip.is_visible()
    page.mouse.move(*at(page, 0, 0, 25.0))
    tip.wait_for(state="visible")
    shown = tip.inner_text()
    for text in (LONG.name, LONG.op, LONG.source, "8 KiB", "rank 0, compute", "30 ms, from 10 ms"):
        assert text in shown
    page.mouse.move(*at(page, 0, 0, 45.0))
    tip.wait_for(state="hidden")
    page.mouse.move(*at(page, 1, 1, 41.0))
    tip.wait_for(state="visible")
    assert "rank 1, recv" in tip.inner_text()


def test_keys_do_the_same(page: Page) -> None:
    canvas(page).focus()
    page.keyboard.press("+")
    low, _ = wait_for_view(page, lambda low, high: high - low < 99)
    page.keyboard.press("ArrowRight")
    wait_for_view(page, lambda left, _: left > low)
    page.keyboard.press("0")
    wait_for_view(page, lambda low, high: (low, high) == (0.0, 100.0))


def test_the_legend_names_what_occurs(page: Page) -> None:
    assert page.locator("#legend span").all_inner_texts() == [
        "forward (F)",
        "backward (B)",
        "message",
    ]
    assert page.title() == "@step"
    assert Path(page.url).suffix == ".html"
