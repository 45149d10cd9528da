"""Draws the comparison.

python benchmarks/ray_comparison/plot.py benchmarks/results/ray_comparison.json FILE.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
from matplotlib import pyplot

COLOURS = {
    "ray core": "#9aa5b1",
    "ray compiled": "#d1495b",
    "cg": "#00798c",
    "cg source": "#7cc6d2",
    "cg bound": "#004e5a",
    "mpi4py": "#edae49",
}
NAMES = {
    "ray core": "Ray Core",
    "ray compiled": "Ray Compiled Graph",
    "cg": "cg, compiled wheel",
    "cg source": "cg, from source",
    "cg bound": "cg, compiled wheel, bound to cores",
}


def draw(summary: dict[str, dict[str, dict[str, float]]], file: Path) -> None:
    """Times of all arms, and how many executions they do in a second.

    Args:
        summary: figures by arm and cell.
        file: where the picture goes.
    """
    matplotlib.use("svg")
    # The same figures give the same file, and text stays text.
    pyplot.rcParams.update({"svg.hashsalt": "cg", "svg.fonttype": "none", "font.size": 9})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 6), width_ratios=(3, 2))
    bars(left, summary, "p50_us", "µs, median (shorter is better)")
    bars(right, summary, "per_second", "executions per second (longer is better)")
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def bars(
    axes: pyplot.Axes, summary: dict[str, dict[str, dict[str, float]]], name: str, label: str
) -> None:
    """One group of bars for each cell that has the figure."""
    cells = [
        cell
        for cell in dict.fromkeys(cell for cells in summary.values() for cell in cells)
        if any(name in cells.get(cell, {}) for cells in summary.values())
    ]
    height = 0.8 / len(summary)
    for index, (arm, figures) in enumerate(summary.items()):
        places = [row for row, cell in enumerate(cells) if name in figures.get(cell, {})]
        widths = [figures[cells[row]][name] for row in places]
        centres = [row + (index - (len(summary) - 1) / 2) * height for row in places]
        colour = COLOURS.get(arm)
        drawn = axes.barh(centres, widths, height, color=colour, label=NAMES.get(arm, arm))
        axes.bar_label(drawn, [shown(width) for width in widths], padding=2, fontsize=6)
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_yticks(range(len(cells)), cells)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)


def shown(value: float) -> str:
    """A figure with three digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def main() -> None:
    record, file = map(Path, sys.argv[1:])
    draw(json.loads(record.read_text())["figures"]["medians"], file)


if __name__ == "__main__":
    main()
