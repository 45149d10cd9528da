"""Choose the form of attention over a cut sequence: gather, heads or ring.

The estimate is of the time that a rank waits, in floating-point operations that it could do
meanwhile, so that it is the same on all ranks and machines:

- gather: all bytes of keys and values come before attention begins.
- heads: all exchanged bytes come before, and go behind.
- ring: the bytes of a block travel beside a block of products, and a rank waits for what takes
  longer than that. Each step costs a start.

A backward moves and computes a multiple of this in all forms, and is left out. Of equal times, the
form is taken that keeps fewer bytes, then the one that receives fewer, then heads, then gather.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTE = 2000
"""The operations that a rank can do while it receives a byte: some 800 TFLOP/s of 16 bits, and 400
GB/s by NVLink (NVIDIA's data sheet of the H200 has 990 and 450)."""

START = 20_000_000_000
"""The operations in the time that a step costs beside its bytes and products: some 25 microseconds
for its launches and the join of its results."""

_ORDER = ("heads", "gather", "ring")


@dataclass(frozen=True)
class Sizes:
    """The sizes of attention, as a rank sees them before anything is exchanged.

    Attributes:
        ranks: the number of pieces of the sequence.
        query, key, value, out: bytes of a rank's piece.
        products: operations of a rank for all keys, in the forward.
    """

    ranks: int
    query: int
    key: int
    value: int
    out: int
    products: int


@dataclass(frozen=True)
class Estimate:
    """The costs of a form for a rank, in the forward.

    Attributes:
        form: its name.
        received: the bytes that the rank receives.
        kept: the bytes of keys and values of other ranks that it keeps for the backward.
        waits: the time that it waits, in operations.
    """

    form: str
    received: int
    kept: int
    waits: int

    def __str__(self) -> str:
        return (
            f"{self.form} receives {_bytes(self.received)}, keeps {_bytes(self.kept)}, and waits "
            f"for {self.waits / 1e9:.1f} GFLOP"
        )


def estimates(sizes: Sizes) -> dict[str, Estimate]:
    """The costs of each form, by name."""
    others = sizes.ranks - 1
    block = sizes.key + sizes.value
    exchanged = (sizes.query + block + sizes.out) * others // sizes.ranks
    step = sizes.products // sizes.ranks
    hidden = max(block * BYTE - step, 0) * others
    return {
        "heads": Estimate("heads", exchanged, 0, exchanged * BYTE),
        "gather": Estimate("gather", block * others, block * others, block * others * BYTE),
        "ring": Estimate("ring", block * others, 0, hidden + others * START),
    }


def best(sizes: Sizes, refused: dict[str, str]) -> tuple[str, str]:
    """The form that is expected to be the fastest, and why.

    Args:
        sizes: of the op.
        refused: the forms that cannot be, with the reason.

    Returns:
        The form, and the reason in words.
    """
    possible = {form: e for form, e in estimates(sizes).items() if form not in refused}
    chosen = min(
        possible.values(), key=lambda e: (e.waits, e.kept, e.received, _ORDER.index(e.form))
    )
    others = [str(e) for e in possible.values() if e is not chosen]
    impossible = [f"no {form}: {reason}" for form, reason in refused.items()]
    return chosen.form, "; ".join([str(chosen), *others, *impossible])


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count} bytes"
