"""The loss curve of a run, as a picture."""

from __future__ import annotations

from pathlib import Path


def plot(
    losses: list[float],
    validation: list[tuple[int, float]],
    unigram: float | None,
    file: Path,
    unit: str = "byte",
) -> None:
    """Write the curve as a PNG.

    Args:
        losses: of each step.
        validation: steps, and the losses after them.
        unigram: the loss of a model without context, if it is known.
        unit: of the losses, such as a byte or a token.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(losses) + 1), losses, lw=0.8, label="training")
    axes.plot(*zip(*validation, strict=True), "o-", label="validation")
    if unigram is not None:
        axes.axhline(unigram, ls=":", color="gray", label="unigram model, validation")
    axes.set(xlabel="step", ylabel=f"loss, nats a {unit}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
