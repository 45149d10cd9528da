"""Plots of an ablation: for each figure the ratio of every arm to the base, with its interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(ratios: dict[str, dict[str, Any]], out: Path) -> list[Path]:
    """One picture for each figure; arms without an effect are grey."""
    import matplotlib  # takes a second, which tests of the benchmark save

    matplotlib.use("Agg")
    from matplotlib import pyplot

    out.mkdir(exist_ok=True)
    files = []
    for name in next(iter(ratios.values()), {}):
        arms = list(ratios)
        rows = [ratios[arm][name] for arm in arms]
        figure, axes = pyplot.subplots(figsize=(7, 0.35 * len(arms) + 1.2))
        for place, row in enumerate(rows):
            colour = "tab:blue" if row["effect"] else "0.6"
            axes.plot([row["low"], row["high"]], [place, place], color=colour, linewidth=2)
            axes.plot(row["ratio"], place, "o", color=colour)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(arms)), [arm.replace("_", " ") for arm in arms])
        axes.invert_yaxis()
        axes.set_xlabel(f"{name}, ratio to base (95 % interval)")
        figure.tight_layout()
        files.append(out / (name.replace(": ", "-").replace(" ", "-") + ".svg"))
        figure.savefig(files[-1])
        pyplot.close(figure)
    return files
