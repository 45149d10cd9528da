"""Train two towers of different sizes, CLIP's way: images on three ranks, captions on one.

    mpirun -n 4 python examples/clip.py                 # --shape 3+1
    mpirun -n 4 python examples/clip.py --table         # what each shape makes of four ranks
    CG_RANKS=4 python examples/clip.py --check          # gradients, against those of one process

The contrastive loss compares each image of the batch with each caption, so no part of the batch has
a loss of its own. It is an actor over all ranks: each has its rows of the table of similarities.
The step below is what one process would do; cg derives what ranks exchange, and the gradients.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

import cg

PATCH, WORDS, LENGTH = 8, 32, 16
"""Side of a patch; size of the vocabulary; words of a caption, and patches of an image."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of both towers."""

    width: int = 96
    vision: int = 6
    text: int = 2
    features: int = 48


class Block(nn.Module):
    """A pre-norm transformer block: [batch, places, width] to the same."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, places, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, places, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.out(mixed.reshape(batch, places, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Trained(nn.Module):
    """A module with an optimizer of its own."""

    def train_by(self, rate: float) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=rate)

    def update(self) -> None:
        """Ordinary PyTorch: it runs on every rank that holds the actor, on what that rank holds."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class Tower(Trained):
    """Blocks over embedded places, and one normalised vector for each example."""

    def __init__(self, sizes: Sizes, layers: int, embed: nn.Module, rate: float) -> None:
        super().__init__()
        self.embed = embed
        self.places = nn.Parameter(torch.randn(LENGTH, sizes.width) * 0.02)
        self.blocks = nn.Sequential(*(Block(sizes.width) for _ in range(layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.project = nn.Linear(sizes.width, sizes.features, bias=False)
        self.train_by(rate)

    def features(self, x: Tensor) -> Tensor:
        """[batch, LENGTH, ...] to unit vectors [batch, features]."""
        x = self.norm(self.blocks(self.embed(x) + self.places)).mean(1)
        return F.normalize(self.project(x), dim=-1)


@cg.actor
class Vision(Tower):
    """A small vision transformer over patches of images [batch, 3, side, side]."""

    def __init__(self, sizes: Sizes, rate: float) -> None:
        torch.manual_seed(1)  # the same weights, whatever the shape
        super().__init__(sizes, sizes.vision, nn.Linear(3 * PATCH**2, sizes.width), rate)

    def forward(self, images: Tensor) -> Tensor:
        batch, _, height, width = images.shape
        patches = images.view(batch, 3, height // PATCH, PATCH, width // PATCH, PATCH)
        return self.features(patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, LENGTH, 3 * PATCH**2))


@cg.actor
class Text(Tower):
    """A transformer over the words of captions [batch, LENGTH]."""

    def __init__(self, sizes: Sizes, rate: float) -> None:
        torch.manual_seed(2)
        super().__init__(sizes, sizes.text, nn.Embedding(WORDS, sizes.width), rate)

    def forward(self, words: Tensor) -> Tensor:
        return self.features(words)


@cg.actor
class Loss(Trained):
    """Cross entropy of images among captions, and of captions among images."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.train_by(rate)

    def forward(self, v: Tensor, t: Tensor) -> Tensor:
        """The loss of images v and captions t, unit vectors [batch, features]; rows are pairs."""
        logits = self.logit_scale.exp() * v @ t.T
        pairs = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


@dataclass(frozen=True)
class Shape:
    """The number of ranks of a tower: the first ones for images, the next ones for captions."""

    vision: int
    text: int
    shared: bool = False

    @staticmethod
    def of(word: str, ranks: int) -> Shape:
        """Read `3+1`, or `all`: then every rank has both towers, and a part of the batch.

        Raises:
            ValueError: the word says something else, or there are fewer ranks.
        """
        if word == "all":
            return Shape(ranks, ranks, shared=True)
        vision, plus, text = word.partition("+")
        if not (plus and vision.isdigit() and text.isdigit() and int(vision) and int(text)):
            raise ValueError(f"a shape is all, or ranks for each tower as in 3+1, not '{word}'")
        if int(vision) + int(text) > ranks:
            raise ValueError(
                f"the shape {word} needs {int(vision) + int(text)} ranks, and there are {ranks}: "
                "start more, with mpirun -n or CG_RANKS"
            )
        return Shape(int(vision), int(text))

    def actors(self, sizes: Sizes, rate: float) -> tuple[Any, Any, Any]:
        """Both towers and the loss, on meshes. Each cuts its part of the batch by rows."""
        ranks = self.vision if self.shared else self.vision + self.text
        first = 0 if self.shared else self.vision
        rows = cg.cut(0, "dp")
        vision = Vision.on(cg.mesh(dp=self.vision), plan={"forward(images)": rows})
        text = Text.on(
            cg.mesh(range(first, first + self.text), dp=self.text), plan={"forward(words)": rows}
        )
        # A rank compares its images with all captions, so it needs all of these.
        loss = Loss.on(cg.mesh(dp=ranks), plan={"forward(v)": rows, "forward(t)": cg.whole})
        return vision(sizes, rate), text(sizes, rate), loss(rate)


def make_step(actors: Sequence[Any], update: bool = True) -> cg.Step:
    """The training step; without `update` it leaves gradients where they are."""
    vision, text, head = actors

    @cg.trace
    def clip(images, words):
        loss = head.forward(vision.forward(images), text.forward(words))
        cg.backward(loss)
        if update:
            for actor in (vision, text, head):
                actor.update()
        return loss

    return clip


def batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images [size, 3, side, side] and captions: patch i of an image shows word i, with noise."""
    looks = torch.randn(WORDS, 3, PATCH, PATCH, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed + 1)
    words = torch.randint(WORDS, (size, LENGTH), generator=generator)
    grid = looks[words].unflatten(1, (4, 4)).permute(0, 3, 1, 4, 2, 5)
    images = grid.reshape(size, 3, 4 * PATCH, 4 * PATCH)
    return images + 0.5 * torch.randn(images.shape, generator=generator), words


def differences(shape: Shape, sizes: Sizes, size: int) -> list[float]:
    """The differences of the first step's gradients from those of one process.

    Each is relative to the gradient's largest entry. They are those of the ranks that this process
    plays.
    """
    images, words = batch(size, seed=0)
    actors = shape.actors(sizes, rate=0.0)
    vision, text, head = plain = Vision(sizes, 0.0), Text(sizes, 0.0), Loss(0.0)
    make_step(actors, update=False)(images, words)
    head(vision(images), text(words)).backward()
    ratios = []
    for actor, whole in zip(actors, plain, strict=True):
        references = dict(whole.named_parameters())
        for instance in actor.instances.values():
            for name, parameter in instance.named_parameters():
                grad = references[name].grad
                difference = parameter.grad.cpu() - grad  # an actor's gradients are on its device
                ratios.append(float(difference.abs().max() / grad.abs().max()))
    return ratios


@dataclass(frozen=True)
class Outcome:
    """The outcome of some steps.

    Attributes:
        losses: of each step.
        rate: pairs a second.
        busy: for each rank, the share of the time in which it did not wait for others.
    """

    losses: list[float]
    rate: float
    busy: list[float]


def train(shape: Shape, args: argparse.Namespace) -> Outcome:
    """Train new towers in a shape; the times are those of all steps but the first."""
    actors = shape.actors(Sizes(args.width, args.vision, args.text), args.rate)
    batches = [batch(args.batch, seed) for seed in range(args.steps)]
    compiled = make_step(actors).lower(*batches[0]).compile()
    losses = [float(compiled(*batches[0]))]
    cg.barrier()
    before, began = compiled.statistics(), time.perf_counter()
    losses += [float(compiled(*pair)) for pair in batches[1:]]
    seconds, after = time.perf_counter() - began, compiled.statistics()
    waited = (after.blocked - before.blocked) / max(after.total - before.total, 1e-9)
    rate = args.batch * (args.steps - 1) / max(seconds, 1e-9)
    return Outcome(losses, rate, [1 - share for share in cg.allgather(waited)])


def parse() -> argparse.Namespace:
    ranks = cg.world_size()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = f"{ranks - 1}+1" if ranks > 1 else "all"
    parser.add_argument("--shape", default=usual, help="3+1, 2+2, ..., or all")
    parser.add_argument("--table", action="store_true", help="time all shapes, one after the other")
    parser.add_argument("--check", action="store_true", help="compare gradients with one process")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=48, help="pairs a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--width", type=int, default=Sizes.width)
    parser.add_argument("--vision", type=int, default=Sizes.vision, help="blocks of the tower")
    parser.add_argument("--text", type=int, default=Sizes.text, help="blocks of the tower")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first is not timed")
    try:
        Shape.of(args.shape, ranks)
    except ValueError as error:
        parser.error(f"--shape: {error}")
    return args


def shapes(ranks: int) -> list[str]:
    """The shapes of the table: every way to share out the ranks, one rank a tower, and `all`."""
    uneven = [f"{ranks - text}+{text}" for text in range(1, ranks // 2 + 1)]
    return list(dict.fromkeys([*uneven, *(["1+1"] if ranks > 1 else []), "all"]))


def main() -> None:
    args = parse()
    talks, ranks = cg.rank() == 0, cg.world_size()
    if args.check:
        sizes = Sizes(args.width, args.vision, args.text)
        ratios = differences(Shape.of(args.shape, ranks), sizes, args.batch)
        worst = max(cg.allgather(max(ratios, default=0.0)))
        if talks:
            print(f"{args.shape}: gradients differ from those of one process by {worst:.1e}")
        return
    if talks:
        print("shape   first loss   last loss   samples/s   busy share of each rank")
    for word in shapes(ranks) if args.table else [args.shape]:
        outcome = train(Shape.of(word, ranks), args)
        if talks:
            busy = " ".join(f"{share:4.0%}" for share in outcome.busy)
            first, last = outcome.losses[0], outcome.losses[-1]
            print(f"{word:5} {first:12.3f} {last:11.3f} {outcome.rate:11.0f}   {busy}", flush=True)
    if talks and args.table:
        print(f"all: each of the {ranks} ranks has both towers, and a part of the batch")


if __name__ == "__main__":
    main()
