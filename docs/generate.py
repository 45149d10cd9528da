"""Write what the documentation takes from the code: `python docs/generate.py`.

Reference tables, pages made of docstrings, and the output of the snippets that are marked to be
run are all kept in the pages themselves, so that they can be read without building anything;
pictures of recorded figures are kept beside them. A test holds each page and each picture against
what this script would write.
"""

from __future__ import annotations

import argparse
import sys

from generator.pages import NOTEBOOKS, PAGES, PICTURES, ROOT, render


def main() -> int:
    """Rewrite the pages that are out of date; with --check, only name them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if stale")
    parser.add_argument("pages", nargs="*", help="parts of the names of pages; all by default")
    options = parser.parse_args()
    stale = []
    for page in (*PAGES, *PICTURES, *NOTEBOOKS):
        name = str(page.relative_to(ROOT))
        if options.pages and not any(part in name for part in options.pages):
            continue
        text = render(page)
        if not page.exists() or text != page.read_text(encoding="utf-8"):
            stale.append(name)
            if not options.check:
                page.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name} {'is out of date' if options.check else 'rewritten'}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
