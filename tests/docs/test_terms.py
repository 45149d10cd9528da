"""Terms on the pages of the site lead to the glossary."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import terms  # noqa: E402

MEANINGS = {"rank": "one process", "rank scheduler": "lets `executions` take turns", "op": "x < y"}


def test_the_first_use_of_a_term_is_a_link() -> None:
    assert terms.link_terms("<p>A rank, two ranks.</p>", MEANINGS, "../glossary/") == (
        '<p>A <a class="term" href="../glossary/#term-rank" title="one process">rank</a>, '
        "two ranks.</p>"
    )


def test_a_term_of_several_words_goes_before_its_words() -> None:
    content = terms.link_terms("<p>Rank schedulers of a rank</p>", MEANINGS, "")
    assert (
        'href="#term-rank-scheduler" title="lets executions take turns">Rank schedulers' in content
    )
    assert content.count("<a") == 2


def test_meanings_are_escaped() -> None:
    assert 'title="x &lt; y">op</a>' in terms.link_terms("<p>an op</p>", MEANINGS, "")


def test_headings_code_links_and_parts_of_words_stay() -> None:
    content = (
        "<h2>A rank</h2><p><code>rank</code> <a href='x'>a rank</a> ranking, cg.rank, rank.py, "
        "multi-rank</p><pre><code>rank\n</code></pre><table><th>rank</th></table>"
    )
    assert terms.link_terms(content, MEANINGS, "") == content


def test_ordinary_words_are_no_links() -> None:
    assert terms.link_terms("<p>code</p>", {"code": "a bound program"}, "") == "<p>code</p>"


def test_rows_of_the_glossary_give_the_meanings() -> None:
    text = "| term | means |\n|---|---|\n| rank, world | a; b |\n\n## Retired\n\n| seat | x |\n"
    assert terms.terms(text) == {"rank": "a; b", "world": "a; b"}


def test_each_link_has_an_anchor_in_the_glossary() -> None:
    text = terms.GLOSSARY.read_text(encoding="utf-8")
    meanings = terms.terms(text)
    assert len(meanings) > 50
    assert set(meanings) >= terms.ORDINARY
    rows = "".join(
        f"<td>{', '.join(row[0].split(', '))}</td> <td>x</td>" for row in terms._ROW.findall(text)
    )
    marked = terms.mark_terms(rows)
    assert [term for term in meanings if f'id="{terms.anchor(term)}"' not in marked] == []


def test_the_hook_knows_where_the_glossary_is() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guide/steps.md"), url="guide/steps/")
    assert 'href="../../glossary/#term-actor"' in terms.on_page_content(
        "<p>an actor</p>", page=page
    )
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/ir.md"), url="reference/ir/")
    assert terms.on_page_content("<p>an actor</p>", page=page) == "<p>an actor</p>"
