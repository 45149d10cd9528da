"""The documentation is true: generated parts, snippets and their output, links, files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))  # the generator is no part of the package

from generator import bars, serving  # noqa: E402
from generator.docstrings import to_markdown  # noqa: E402
from generator.pages import NOTEBOOKS, PAGES, PICTURES, render  # noqa: E402
from generator.snippets import SnippetError, run_page  # noqa: E402

IDS = [str(page.relative_to(ROOT)) for page in PAGES]
DRAWN = [str(file.relative_to(ROOT)) for file in (*PICTURES, *NOTEBOOKS)]


def marked(page: Path) -> object:
    """Notebooks that start ranks of their own are tagged as slow."""
    tags = (
        json.loads(page.read_text("utf-8"))["metadata"].get("tags", ()) if page in NOTEBOOKS else ()
    )
    return pytest.param(page, marks=[pytest.mark.slow] if "slow" in tags else [])


EVERY = [marked(page) for page in (*PAGES, *PICTURES, *NOTEBOOKS)]


@pytest.mark.parametrize("page", EVERY, ids=IDS + DRAWN)
def test_pages_are_up_to_date(page: Path) -> None:
    """Runs the page's snippets in the virtual world, too."""
    lines, written = render(page).splitlines(), page.read_text(encoding="utf-8").splitlines()
    for number, (line, old) in enumerate(zip(lines, written, strict=False), 1):
        assert line == old, f"{page}:{number} is out of date: run python docs/generate.py"
    assert len(lines) == len(written), f"{page} is out of date: run python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page} links to {target}: there is no {file}"
        if anchor:
            assert anchor in anchors(file), f"{page} links to {target}: no such heading"


CODE = re.compile(r"`((?:ir|tracer|passes|backends|launch|tests|examples|benchmarks)/[\w./-]*)`")
NAMED = re.compile(r"`(\w+)`\s+(?:and `(\w+)`\s+)?(?:of `\w+`\s+)?in\s+`([\w/]+\.py)`")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_that_pages_name_exist(page: Path) -> None:
    named = CODE.findall(page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_walks_name_what_is_in_the_files() -> None:
    named = NAMED.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(named) > 10
    for *names, path in named:
        for name in filter(None, names):
            defined = rf"^ *(def|class) {name}\b|^{name}\b.*="
            found = re.search(defined, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
            assert found is not None, f"CONTRIBUTING.md: there is no {name} in {path}"


def links(page: Path) -> list[str]:
    """The relative links of a page, without those inside of code."""
    text = prose(page)
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`\B", "", text))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    kept = (re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip() for heading in headings)
    return {re.sub(r"\s+", "-", heading.lower()) for heading in kept}


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    pages |= {f"tutorials/{notebook.stem}.md" for notebook in NOTEBOOKS}
    assert listed == pages


TAUGHT = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "design"]


@pytest.mark.parametrize("page", TAUGHT, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_first_what_one_can_do_after_it(page: Path) -> None:
    after_title = page.read_text(encoding="utf-8").split("\n\n")[1]
    assert after_title.startswith("After this page you "), f"{page} begins otherwise"


LONGEST = 2000


@pytest.mark.parametrize("page", TAUGHT, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_short(page: Path) -> None:
    """Words that people write: without code, and without what is made of code and of records."""
    written = re.sub(r"<!-- generated.*?<!-- end -->", "", page.read_text("utf-8"), flags=re.S)
    words = len(re.sub(r"^```.*?^```", "", written, flags=re.S | re.M).split())
    assert words <= LONGEST, f"{page} has {words} words: divide it"


def test_one_version_is_named_everywhere() -> None:
    """The changelog begins with it, and the package is cited by it."""
    places = {
        "setup.cfg": r"^version = (\S+)$",
        "CITATION.cff": r"^version: (\S+)$",
        "CHANGELOG.md": r"^## (\S+) ",
    }
    found = {
        name: re.findall(pattern, (ROOT / name).read_text("utf-8"), re.MULTILINE)[0]
        for name, pattern in places.items()
    }
    assert len(set(found.values())) == 1, found


def test_every_picture_is_shown_by_a_page() -> None:
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page)}
    assert set(PICTURES) <= shown


def test_bars_are_as_long_as_their_values() -> None:
    def group(label: str, *values: float) -> bars.Group:
        return bars.Group(label, tuple(bars.Bar(value, "blue", str(value)) for value in values))

    # A heading begins a scale of its own.
    groups = [group("one"), group("a", 50.0), group("b", 100.0, 0.0), group("two"), group("c", 2.0)]
    picture = bars.draw("Speed", "<of light>", groups, [("grey", "not drawn")])
    width = r'<rect class="blue" x="[\d.]+" y="[\d.]+" width="([\d.]+)"'
    half, full, none, other = map(float, re.findall(width, picture))
    assert half == full / 2
    assert (none, other) == (0.0, full)
    assert ElementTree.fromstring(picture)[0].text == "Speed"
    assert "prefers-color-scheme: dark" in picture
    with pytest.raises(KeyError, match="no colour red; there are blue"):
        bars.draw("", "", [bars.Group("a", (bars.Bar(1.0, "red", ""),))], [])


def run(text: str) -> str:
    return run_page(text, Path("page.md"))


def test_output_is_put_where_it_belongs() -> None:
    page = "<!-- run -->\n```python\nprint(6 * 7)\n```\n\n<!-- output -->\n```text\nold\n```\n"
    assert run(page) == page.replace("old", "42")


def test_what_needs_a_program_that_is_not_there_stays_as_it_is() -> None:
    page = (
        "<!-- run needs={} -->\n```python\nprint(6 * 7)\n```\n<!-- output -->\n```text\nold\n```\n"
    )
    assert run(page.format("no-such-program")) == page.format("no-such-program")
    assert run(page.format("sh")) == page.format("sh").replace("old", "42")


def test_snippets_of_a_page_share_names_and_directory() -> None:
    run(
        "<!-- run -->\n```python\nopen('note.txt', 'w').write(name := 'x')\n```\n"
        "<!-- run -->\n```sh\ntest -f note.txt\n```\n"
        "<!-- run -->\n```python\nassert name == 'x'\n```\n"
    )


def test_the_world_has_the_size_that_the_page_asks_for() -> None:
    run("<!-- run ranks=5 -->\n```python\nimport cg\nassert cg.world_size() == 5\n```\n")


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- run -->\n```python\n1 / 0\n```\n", "snippet 1 failed:\nZeroDivisionError"),
        ("<!-- run -->\n```sh\nexit 3\n```\n", "snippet 1 failed"),
        ("<!-- run raises -->\n```python\npass\n```\n", "snippet 1 did not fail"),
        ("<!-- output -->\n```text\n```\n", "no snippet has run before it"),
    ],
)
def test_a_snippet_that_does_something_else_is_an_error(page: str, message: str) -> None:
    with pytest.raises(SnippetError, match=message):
        run(page)


def test_docstrings_become_markdown() -> None:
    doc = """Do it.

    As in::

        %x = copy(%y)

    Args:
        x: a thing, which goes
            on here.
        y, z: two more.

    Returns:
        The rest.
    """
    assert to_markdown(doc) == (
        "Do it.\n\nAs in:\n\n```text\n%x = copy(%y)\n```\n\n"
        "*Arguments*:\n\n- `x`: a thing, which goes on here.\n- `y`, `z`: two more.\n\n"
        "*Returns*: The rest."
    )
    assert "Returns" not in to_markdown(doc, skip=("Returns",))


def test_what_is_recorded_of_the_server_becomes_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_RESULTS", tmp_path)
    assert serving.ablation() == serving.slow_link() == "Not recorded yet."
    machine = {"cores": 2, "cpu": "some CPU", "packages": {"torch": "2.13"}}
    origin = {"machine": machine, "date": "today", "command": "python it.py"}
    speed = {"ratio": 0.8, "low": 0.79, "high": 0.81, "effect": True}
    same = {"ratio": 1.0, "low": 0.9, "high": 1.1, "effect": False}
    figures = {"online inf: output_tokens_per_second": speed, "online inf: itl p50": same}
    good = {"ratios": figures, "problems": [], "rounds": 5}
    bad = {"ratios": {}, "problems": ["-prefix switched nothing"], "rounds": 3}
    record = {**origin, "figures": {"front": {"-fast_sse": good}, "engine": {"-prefix": bad}}}
    (tmp_path / "serving_ablation.json").write_text(json.dumps(record))
    text = serving.ablation()
    assert "| `-fast_sse` | 5 | **0.80**, 0.79 to 0.81 |  | 0.90 to 1.10 |" in text
    assert "| `-prefix` | 3 | refused: -prefix switched nothing |" in text
    assert serving.ablation_nano() == "Not recorded yet."
    online = {"online nano: itl p50": same, "online inf: ttft p50": speed}
    run = {"title": "first", "figures": {"-carry": {**good, "ratios": online}}}
    gpu = {**origin, "machine": {**machine, "gpus": {"A": 4}}, "runs": [run]}
    (tmp_path / "serving_ablation_nano.json").write_text(json.dumps(gpu))
    text = serving.ablation_nano()
    assert "first:\n\n" in text
    assert text.endswith("torch 2.13), 4 A")
    assert "| `-carry` | 5 |  |  | 0.90 to 1.10 |  |  |" in text
    row: dict[str, object] = {"arm": "blocking", "groups": 2}
    for name in ("ttft_ms", "itl_ms", "tokens_per_second"):
        row |= {name: 10.04, f"predicted_{name}": 9.0}
    (tmp_path / "slow_link.json").write_text(json.dumps({**origin, "figures": {"rows": [row]}}))
    text = serving.slow_link()
    assert "| blocking | 2 | 10.0, 9.0 | 10.0, 9.0 | 10, 9 |" in text
    assert "today: `python it.py` (2 cores of some CPU, torch 2.13)" in text
