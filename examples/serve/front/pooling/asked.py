"""Requests for vectors and scores: what bodies may say, checked before anything is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...pooling.recipe import EMBED, Recipe
from ...requests import Limits, Request
from .. import fields
from ..errors import ApiError, bad
from ..fields import Body
from ..names import Names
from ..protocol import token_ids
from ..text import Text

MOST_INPUTS = 2048
"""Texts of a request at most, as OpenAI's API has it."""
INPUTS = "a text, a list of token ids, or a list of these"
SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"))
"""Names that vLLM has for the two sides of pairs that are scored."""
_EMPTY = "an input has no tokens: give each at least one"


@dataclass(frozen=True)
class Asked:
    """A checked request.

    Attributes:
        api: `embeddings`, `score` or `rerank`.
        requests: for the engine, one for each text or pair; `EngineJob` gives them ids.
        is_base64: whether vectors are bytes of float32 in base64, and not lists.
        dimensions: to which vectors are cut; None: as they are.
        normalizes: whether vectors have the length 1.
        pairs: of vectors whose cosine is a score, by their places; empty where the engine gives
            scores.
        documents: that are put in order.
        top: how many of these the answer has.
        shows_documents: whether it has their texts.
        id: what names the answer; empty: a random one.
    """

    api: str
    model: str
    requests: tuple[Request, ...]
    is_base64: bool = False
    dimensions: int | None = None
    normalizes: bool = True
    pairs: tuple[tuple[int, int], ...] = ()
    documents: tuple[str, ...] = ()
    top: int = 0
    shows_documents: bool = True
    id: str = ""

    @property
    def tokens(self) -> int:
        """The tokens of all texts."""
        return sum(len(request.prompt) for request in self.requests)


@dataclass(frozen=True)
class Reader:
    """Reads bodies for one model."""

    recipe: Recipe
    names: Names
    text: Text

    def read(self, api: str, body: Body, limits: Limits) -> Asked:
        """Check a body.

        Raises:
            ApiError: 400, or 404 for another name.
        """
        read = {"embeddings": self._embeddings, "score": self._score, "rerank": self._rerank}[api]
        name, _ = self.names.asked(body)
        if api == "embeddings" and self.recipe.task != EMBED:
            message = f"'{name}' gives scores of pairs, and no vectors: ask /v1/score or /v1/rerank"
            raise ApiError(404, message, code="model_not_supported")
        fields.refuse_others(body, api)
        return read(name, body, limits)

    def _embeddings(self, name: str, body: Body, limits: Limits) -> Asked:
        value = fields.required(body, "input", INPUTS)
        encode = self._encoder(body, limits, "input")
        texts = [self._tokens(item, encode, limits) for item in _inputs(value)]
        kind = fields.string(body, "encoding_format", "float")
        if kind not in ("float", "base64"):
            bad("encoding_format must be float or base64", "encoding_format")
        return Asked(
            "embeddings",
            name,
            tuple(_request(ids) for ids in texts),
            is_base64=kind == "base64",
            dimensions=self._dimensions(body, limits),
            normalizes=fields.boolean(body, "normalize", self.recipe.normalizes),
            id=fields.string(body, "request_id"),
        )

    def _score(self, name: str, body: Body, limits: Limits) -> Asked:
        first, second = next((pair for pair in SIDES if set(pair) & set(body)), SIDES[0])
        ones, others = _texts(body, first), _texts(body, second)
        if len(ones) not in (1, len(others)):
            bad(
                f"{first} has {len(ones)} texts and {second} {len(others)}: give one, or as many "
                f"as in {second}",
                first,
            )
        requests, pairs = self._pairs(body, ones, others, limits, second)
        return Asked("score", name, requests, pairs=pairs, id=fields.string(body, "request_id"))

    def _rerank(self, name: str, body: Body, limits: Limits) -> Asked:
        query = fields.required(body, "query", "a text")
        if not isinstance(query, str):
            bad("query must be a text", "query")
        documents = _texts(body, "documents")
        requests, pairs = self._pairs(body, [query], documents, limits, "documents")
        top = fields.integer(body, "top_n", 0, 0, None) or len(documents)
        return Asked(
            *("rerank", name, requests),
            pairs=pairs,
            documents=tuple(documents),
            top=top,
            shows_documents=fields.boolean(body, "return_documents", True),
            id=fields.string(body, "request_id"),
        )

    def _pairs(
        self, body: Body, ones: Sequence[str], others: Sequence[str], limits: Limits, field: str
    ) -> tuple[tuple[Request, ...], tuple[tuple[int, int], ...]]:
        """The requests for pairs; with vectors also which of them belong together."""
        if self.recipe.task == EMBED:
            encode = self._encoder(body, limits, field)
            requests = tuple(_request(encode(text)) for text in (*ones, *others))
            count = len(ones)
            return requests, tuple((i % count, count + i) for i in range(len(others)))
        cut = self._cut(body, limits)
        requests = list[Request]()
        for place, other in enumerate(others):
            pair = self._lowered(ones[place % len(ones)]), self._lowered(other)
            ids, second = self.text.encode_pair(*pair, cut)
            requests.append(_request(_fitting(ids, limits, field), second))
        return tuple(requests), ()

    def _encoder(self, body: Body, limits: Limits, field: str) -> Callable[[str], tuple[int, ...]]:
        special, cut = fields.boolean(body, "add_special_tokens", True), self._cut(body, limits)

        def encode(text: str) -> tuple[int, ...]:
            ids = self.text.encode_cut(self._lowered(text), special, cut)
            return _fitting(ids, limits, field)

        return encode

    def _tokens(
        self, item: object, encode: Callable[[str], tuple[int, ...]], limits: Limits
    ) -> tuple[int, ...]:
        """The tokens of an input."""
        if isinstance(item, str):
            if not item:
                bad("input has an empty text: give each at least one character", "input")
            return encode(item)
        ids = token_ids(item, "input", limits)
        return _fitting(ids, limits, "input")

    def _lowered(self, text: str) -> str:
        return text.lower() if self.recipe.lowers else text

    def _cut(self, body: Body, limits: Limits) -> int | None:
        """The tokens to which texts are cut at their ends; None: they are not."""
        name = "truncate_prompt_tokens"
        length: int | None = fields.integer(body, name, None, -1, limits.context)
        if length == 0:
            bad(f"{name} must be -1, or at least 1", name)
        return limits.context if length == -1 else length

    def _dimensions(self, body: Body, limits: Limits) -> int | None:
        wanted: int | None = fields.integer(body, "dimensions", None, 1, limits.width)
        allowed = self.recipe.dimensions
        if wanted in (None, limits.width):
            return None
        if allowed is None:
            bad(
                f"dimensions may only be {limits.width}: the model was not trained for vectors "
                "that are cut, as far as its folder says; if it was, start the server with "
                "--dimensions",
                "dimensions",
            )
        if allowed and wanted not in allowed:
            bad(f"dimensions may be {', '.join(map(str, allowed))}", "dimensions")
        return wanted


def _request(ids: tuple[int, ...], second: int = 0) -> Request:
    return Request(0, ids, 1, second=second)


def _inputs(value: Any) -> list[Any]:
    """The inputs of a body, each a text or a list of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        bad(f"input must be {INPUTS}", "input")
    if not value:
        bad(f"input is empty: give {INPUTS}", "input")
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return [value]
    _check_number(value, "input")
    if not all(isinstance(item, str | list) for item in value):
        bad(f"input must be {INPUTS}", "input")
    return value


def _texts(body: Body, name: str) -> list[str]:
    """The texts of a field, one or several."""
    value = fields.required(body, name, "a text, or a list of texts")
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        bad(f"{name} must be a text, or a list of texts", name)
    if not listed:
        bad(f"{name} is empty: give at least one text", name)
    _check_number(listed, name)
    return listed


def _check_number(listed: list[Any], name: str) -> None:
    if len(listed) > MOST_INPUTS:
        bad(f"{name} has {len(listed)} texts, and a request may have {MOST_INPUTS}", name)


def _fitting(ids: Sequence[int], limits: Limits, field: str) -> tuple[int, ...]:
    if not ids:
        bad(_EMPTY, field)
    if len(ids) > limits.context:
        message = (
            f"a text of {field} has {len(ids)} tokens, and this model takes {limits.context}: "
            "shorten it, or send truncate_prompt_tokens=-1"
        )
        raise ApiError(400, message, field, "context_length_exceeded")
    return tuple(ids)
