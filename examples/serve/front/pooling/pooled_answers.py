"""Answers with vectors, scores and orders, in the shapes of OpenAI and vLLM."""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from ...requests import ERROR
from ..errors import ApiError
from ..job import GONE, EngineJob
from ..metrics import Metrics
from .asked import Asked

FAILURES = {ERROR: 500, GONE: 503}
PIECE = 1 << 16
"""Bytes of an answer after which others have a turn."""
PREFIXES = {"embeddings": "embd", "score": "score", "rerank": "rerank"}


class PooledAnswers:
    """Gives texts to the engine, and makes answers of its vectors."""

    def __init__(self, job: EngineJob, metrics: Metrics) -> None:
        self._job, self._metrics = job, metrics

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        """Answer a request.

        Raises:
            ApiError: the engine has failed, or takes no requests.
        """
        reply = self._job.enter(asked.requests)
        try:
            while not all(reply.ends):
                await reply.changed()
        finally:
            self._job.cancel(reply)
        ends = [end for end in reply.ends if end is not None]
        for end in ends:
            if end.reason in FAILURES:
                raise ApiError(FAILURES[end.reason], end.message)
        self._metrics.count_end(reply, asked.tokens, (end.reason for end in ends))
        vectors = [np.frombuffer(reply.vectors[i], np.float32) for i in range(len(ends))]
        return await _written(request, _pieces(asked, vectors))


def _pieces(asked: Asked, vectors: Sequence[NDArray[np.float32]]) -> Iterator[str]:
    """The text of an answer, in pieces."""
    head = {
        "id": asked.id or f"{PREFIXES[asked.api]}-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": asked.model,
        "usage": {
            "prompt_tokens": asked.tokens,
            "completion_tokens": 0,
            "total_tokens": asked.tokens,
        },
    }
    name = "results" if asked.api == "rerank" else "data"
    yield f"{json.dumps(head)[:-1]}, {json.dumps(name)}: ["
    separator = ""
    for entry in _entries(asked, vectors):
        yield separator + json.dumps(entry)
        separator = ", "
    yield "]}"


def _entries(asked: Asked, vectors: Sequence[NDArray[np.float32]]) -> Iterator[dict[str, Any]]:
    if asked.api == "embeddings":
        for index, vector in enumerate(vectors):
            shown = finished(vector, asked.dimensions, asked.normalizes)
            yield {"object": "embedding", "index": index, "embedding": _encoded(shown, asked)}
        return
    scores = _scores(asked, vectors)
    if asked.api == "score":
        for index, score in enumerate(scores):
            yield {"object": "score", "index": index, "score": score}
        return
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    for index in order[: asked.top]:
        document = {"document": {"text": asked.documents[index]}} if asked.shows_documents else {}
        yield {"index": index, **document, "relevance_score": scores[index]}


def finished(
    vector: NDArray[np.float32], dimensions: int | None, normalizes: bool
) -> NDArray[np.float32]:
    """A vector as clients get it: cut first, then brought to the length 1, as vLLM does it."""
    shown = vector[:dimensions]
    if normalizes:
        shown = shown / max(float(np.linalg.norm(shown.astype(np.float64))), 1e-12)
    return np.asarray(shown, "<f4")


def _encoded(vector: NDArray[np.float32], asked: Asked) -> str | list[float]:
    if asked.is_base64:
        return base64.b64encode(vector.tobytes()).decode()
    listed: list[float] = vector.tolist()
    return listed


def _scores(asked: Asked, vectors: Sequence[NDArray[np.float32]]) -> list[float]:
    """The score of each pair: what the engine says, or the cosine of two vectors."""
    if not asked.pairs:
        return [float(vector[0]) for vector in vectors]
    long = [vector.astype(np.float64) for vector in vectors]
    unit = [vector / max(float(np.linalg.norm(vector)), 1e-12) for vector in long]
    return [float(unit[one] @ unit[other]) for one, other in asked.pairs]


async def _written(request: web.Request, pieces: Iterator[str]) -> web.StreamResponse:
    """Write an answer in pieces, so that others are served between two of them."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    kept, size = list[str](), 0
    for piece in pieces:
        kept.append(piece)
        size += len(piece)
        if size >= PIECE:
            await response.write("".join(kept).encode())
            kept, size = [], 0
    await response.write("".join(kept).encode())
    await response.write_eof()
    return response
