"""Answers to completions: whole ones, and streams that are written as tokens come."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from aiohttp import web

from ..features import Features
from ..requests import ERROR, UNFOLLOWED
from .choices import Choice, Reading
from .connections import Stream, Waits
from .errors import ApiError
from .job import GONE, EngineJob
from .metrics import Metrics
from .protocol import Completion
from .reply import Reply
from .responses.shape import ResponseShape
from .shapes import Shape
from .text import Text

log = logging.getLogger("serve")

FAILURES = {ERROR: 500, GONE: 503, UNFOLLOWED: 400}
"""Statuses of ends that are no answers, by their reasons."""
INTERVAL = 8
"""Tokens of a chunk, with `+stream_interval`."""


class Answers:
    """Gives completions to the engine, and makes OpenAI's answers of its tokens."""

    def __init__(
        self,
        text: Text,
        job: EngineJob,
        waits: Waits,
        metrics: Metrics,
        features: Features,
    ) -> None:
        self._text, self._job, self._waits, self._metrics = text, job, waits, metrics
        self._features = features

    async def answer(self, request: web.Request, completion: Completion) -> web.StreamResponse:
        """Answer a completion.

        Raises:
            ApiError: the engine has failed, or takes no requests. A stream that has begun ends with
                the error instead.
        """
        reply = self._job.submit(completion)
        try:
            answer = self._stream if completion.stream else self._whole
            return await answer(request, completion, reply)
        finally:
            self._job.cancel(reply)

    async def _whole(
        self, request: web.Request, completion: Completion, reply: Reply
    ) -> web.StreamResponse:
        choices = self._choices(completion, reply)
        texts = ["" for _ in choices]
        while any(choice.reason is None for choice in choices):
            await reply.changed()
            for index, text in self._read(reply, choices):
                texts[index] += text
        prompt = sum(map(len, completion.prompts))
        self._metrics.count_end(reply, prompt, (choice.reason for choice in choices))
        shape = self._shape(completion)
        return web.json_response(shape.answer(texts, choices, prompt))

    async def _stream(
        self, request: web.Request, completion: Completion, reply: Reply
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        if request.transport is None:  # the client has gone
            return response
        stream = Stream(response, request.transport, self._waits)
        shape = self._shape(completion)
        try:
            try:
                await self._pump(stream, completion, reply, shape)
            except ApiError as error:
                await stream.write(_event(error))
            except ConnectionError:
                raise
            except Exception as error:
                log.exception("a stream has failed")
                await stream.write(_event(ApiError(500, type(error).__name__)))
            if shape.done:
                await stream.write(shape.done)
            await response.write_eof()
        except ConnectionError:
            self._metrics.ends["abort"] += 1
        return response

    def _shape(self, completion: Completion) -> Shape | ResponseShape:
        if completion.response is not None:
            return ResponseShape(completion)
        return Shape(completion, self._features, self._text)

    async def _pump(
        self, stream: Stream, completion: Completion, reply: Reply, shape: Shape | ResponseShape
    ) -> None:
        """Write chunks as tokens come, all that there is at a time."""
        if opening := shape.opening():
            await stream.write(opening)
        choices = self._choices(completion, reply)
        is_first = [True for _ in choices]
        failures: list[Exception] = []

        def take() -> bytes:
            pieces = []
            for index, text in self._read(reply, choices):
                choice = choices[index]
                if completion.output.parser is not None or isinstance(shape, ResponseShape):
                    deltas = choice.deltas(text)
                    piece = shape.chunks(index, deltas, choice, is_first[index])
                elif text or completion.shows_ids or choice.reason is not None:
                    piece = shape.chunk(index, text, choice, is_first[index])
                else:
                    continue
                is_first[index] = is_first[index] and not piece
                pieces.append(piece)
            return b"".join(pieces)

        def write_at_once() -> bool:
            if failures or any(reply.ends) or not stream.is_ready:
                return False
            try:
                stream.write_at_once(take())
            except Exception as error:  # of this stream alone, although others' tokens came along
                failures.append(error)
                return False
            return any(choice.reason is None for choice in choices)

        try:
            while any(choice.reason is None for choice in choices):
                await reply.changed()
                if failures:
                    raise failures[0]
                # The first token never waits for others.
                if self._features.stream_interval and not all(is_first) and self._is_small(reply):
                    continue
                if data := take():
                    await stream.write(data)
                    if not self._features.stream_interval and self._features.async_stream:
                        reply.write = write_at_once
        finally:
            reply.write = None  # nothing follows an error; and the function refers to the reply
        prompt = sum(map(len, completion.prompts))
        self._metrics.count_end(reply, prompt, (choice.reason for choice in choices))
        if closing := shape.closing(prompt, choices):
            await stream.write(closing)

    def _choices(self, completion: Completion, reply: Reply) -> list[Choice]:
        reading = Reading(
            completion.stop,
            completion.ends,
            completion.keeps_stop,
            completion.shows_special,
            completion.min_tokens,
            completion.shows_ids,
            completion.sampling.logprobs is not None,
            completion.is_silent,
            completion.output.parser,
            completion.output.kept,
        )
        echoes = completion.echoes or [None] * len(completion.prompts)
        heads = [
            (prompt if completion.continues else (), echo)
            for prompt, echo in zip(completion.prompts, echoes, strict=True)
            for _ in range(completion.n)
        ]
        return [
            Choice(self._text, reading, *head, asked)
            for head, asked in zip(heads, reply.asked, strict=True)
        ]

    def _read(self, reply: Reply, choices: list[Choice]) -> Iterator[tuple[int, str]]:
        """Take the new text of each choice that has some.

        With `+stream_tok` the text of each token comes by itself.

        Raises:
            ApiError: the engine has failed or gone.
        """
        for index, choice in enumerate(choices):
            tokens, end = reply.tokens[index], reply.ends[index]
            if choice.reason is not None or (not tokens and end is None):
                continue
            scores = reply.scores[index]
            reply.tokens[index], reply.scores[index] = [], []
            if end is not None and end.reason in FAILURES:
                raise ApiError(FAILURES[end.reason], end.message)
            if self._features.stream_tok:
                self._features.changes["stream_tok"] += max(0, len(tokens) - 1)
                while len(tokens) > 1 and choice.reason is None:
                    yield index, choice.feed(tokens[:1], None, scores[:1])
                    tokens, scores = tokens[1:], scores[1:]
            if choice.reason is None:
                yield index, choice.feed(tokens, end, scores)
            if choice.reason is not None and end is None:
                self._job.cancel(reply, index)  # at a stop string

    def _is_small(self, reply: Reply) -> bool:
        """True if the new tokens can wait for more, with `+stream_interval`."""
        number = sum(map(len, reply.tokens))
        waits = number < INTERVAL and not any(reply.ends)
        self._features.changes["stream_interval"] += waits
        return waits


def _event(error: ApiError) -> bytes:
    body = web.json_response(error.body()).text
    return f"data: {body}\n\n".encode()
