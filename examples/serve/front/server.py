"""The front: OpenAI's endpoints over HTTP, in a process of its own.

Everything that a client controls is bounded: bodies, headers, waits, requests and their tokens. If
a client goes away, its requests end.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib.metadata
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from ..features import Features
from ..pooling.recipe import Recipe
from ..requests import Limits
from . import fields, protocol
from .adjusting import Rules
from .admission import Admission, Bounds
from .answers import Answers
from .connections import Gate, Waits, limit_waits
from .errors import ApiError
from .job import EngineJob, State
from .metrics import Metrics
from .names import Names
from .pooling.asked import Reader
from .pooling.pooled_answers import PooledAnswers
from .protocol import Completion
from .responses.requests import as_chat, shown
from .structure.checker import Checker
from .text import Text
from .tools.dialects import Dialect, dialect_of
from .tools.messages import messages

log = logging.getLogger("serve")

PAGE = Path(__file__).with_name("page.html")
POOLING = {
    "/v1/embeddings": "embeddings",
    **dict.fromkeys(("/score", "/v1/score"), "score"),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "rerank"),
}
"""Endpoints of models that give a vector or a score for a text, and what they ask for."""
CLOSED = ("/v1/", "/v2/", "/score", "/rerank", "/tokenize", "/detokenize")
"""Paths that need the API key, if there is one."""
LARGE = 1 << 14
"""Bytes of a body that is read and tokenized in a thread, since it takes long."""


class Front:
    """The server of one engine.

    Args:
        names: of the model and its adapters, for clients.
        text: its tokenizer.
        command: starts the engine; see `EngineJob`.
        folder: for its socket, of mode 0700.
        key: the API key that clients have to send; None if they need none.
        rules: of requests.
        dialect: how the model writes calls and thoughts; None: as its template shows.
        origins: of pages that browsers let ask this server; `*` means all.
        recipe: of a model that pools; None: it draws tokens.
    """

    def __init__(
        self,
        names: Names,
        text: Text,
        command: Sequence[str] | Callable[[Path], Awaitable[None]],
        folder: Path,
        bounds: Bounds | None = None,
        features: Features | None = None,
        key: str | None = None,
        rules: Rules | None = None,
        dialect: Dialect | None = None,
        origins: Sequence[str] = (),
        recipe: Recipe | None = None,
    ) -> None:
        self.rules = rules or Rules()
        self.names, self.text, self.bounds = names, text, bounds or Bounds()
        self._origins = frozenset(origins)
        self.dialect = dialect or dialect_of(text.template)
        self.grammars = Checker(text.stored)
        self.features = features or Features()
        self.metrics = Metrics(self.features.changes)
        self.admission = Admission(self.bounds.requests, self.bounds.tokens)
        self.job = EngineJob(command, folder, self.features, self.bounds.requests, self.metrics)
        self.is_draining = False
        self.waits = Waits(self.bounds.stall)
        self.answers = Answers(text, self.job, self.waits, self.metrics, self.features)
        self.reader = None if recipe is None else Reader(recipe, names, text)
        self.pooled = PooledAnswers(self.job, self.metrics)
        self._key = key.encode() if key else None
        self._tokenizing = ThreadPoolExecutor(1)
        self._stop = asyncio.Event()
        app = web.Application(middlewares=[self._answer], client_max_size=self.bounds.body)
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._model),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/responses", self._responses),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                *(web.post(path, self._pooling) for path in POOLING),
            ]
        )
        if self._origins:
            app.on_response_prepare.append(self._let_pages_ask)
        self.runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=self.bounds.idle,
            max_headers=128,
            lingering_time=1.0,
            read_bufsize=1 << 16,
            shutdown_timeout=2.0,
        )

    # -- life --------------------------------------------------------------------------------------

    async def serve(self, listener: socket.socket) -> int:
        """Serve until SIGTERM or SIGINT, then drain; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await self.runner.setup()
        limit_waits(listener, self.bounds.stall)
        assert self.runner.server is not None
        gate = Gate(self.runner.server, self.bounds.connections)
        server = await loop.create_server(gate.connect, sock=listener, backlog=1024)
        job = asyncio.ensure_future(self.job.run())
        stop = asyncio.ensure_future(self._stop.wait())
        cutter = asyncio.ensure_future(self.waits.cut_off())
        await asyncio.wait([job, stop], return_when=asyncio.FIRST_COMPLETED)
        code = 0
        if job.done():
            error = job.exception()
            log.error("the engine never became ready%s", f": {error}" if error else "")
            code = 1
        else:
            await self._drain()
        await self.job.close()
        server.close()
        await self.runner.cleanup()
        job.cancel()
        stop.cancel()
        cutter.cancel()
        self._tokenizing.shutdown(wait=False)
        self.grammars.close()
        return code

    def stop(self) -> None:
        """Drain; when asked again, end at once."""
        if self._stop.is_set():
            log.warning("told again to stop: ending at once")
            self.job.kill()
            raise SystemExit(130)
        self._stop.set()

    async def _drain(self) -> None:
        self.is_draining = True
        log.info("draining: no new requests, %g s for those that run", self.bounds.drain)
        try:
            async with asyncio.timeout(self.bounds.drain):
                while self.admission.requests:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("%d requests have not ended", self.admission.requests)
        self.job.end_all("the server is shutting down")
        for _ in range(100):  # their last answers still have to leave
            if not self.admission.requests:
                break
            await asyncio.sleep(0.02)

    # -- completions -------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, is_chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, is_chat=True)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, is_chat=True, is_response=True)

    async def _complete(
        self, request: web.Request, is_chat: bool, is_response: bool = False
    ) -> web.StreamResponse:
        payload = await self._body(request)
        if self.reader is not None:
            message = (
                f"{request.path} needs a model that draws tokens; '{self.names.model[0]}' pools"
            )
            raise ApiError(404, message, code="model_not_supported")
        limits = self._check_open()

        def check() -> Completion:
            body = protocol.parse(payload)
            chat = as_chat(body) if is_response else body
            completion = protocol.completion(
                chat, is_chat, self.names, self.text, limits, self.rules, self.dialect
            )
            return replace(completion, response=shown(body)) if is_response else completion

        completion = await self._in_thread(check, payload)
        output = completion.output
        if output.grammar:
            grammar = await self.grammars.check(output.grammar, output.field, limits)
            completion = replace(completion, output=replace(output, grammar=grammar))
        if not self.admission.enter(completion.choices, completion.tokens):
            raise ApiError(429, "too many requests; try again later", code="rate_limit_exceeded")
        try:
            self._check_open()
            return await self.answers.answer(request, completion)
        finally:
            self.admission.leave(completion.choices, completion.tokens)

    # -- other endpoints ---------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.StreamResponse:
        text = PAGE.read_text(encoding="utf-8")
        policy = "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
        return web.Response(
            text=text, content_type="text/html", headers={"Content-Security-Policy": policy}
        )

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if self.job.is_healthy:
            return web.Response(text="ok\n")
        raise ApiError(503, f"the engine is {self.job.state.value}")

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        self._check_open()
        return web.Response(text="ok\n")

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        self.metrics.restarts = self.job.starts
        if self.job.limits is not None:
            self.metrics.usable_blocks = self.job.limits.blocks - 1
        return web.Response(body=self.metrics.text(), content_type="text/plain", charset="utf-8")

    async def _models(self, request: web.Request) -> web.StreamResponse:
        cards = [self._card(name) for name in self.names.all]
        return web.json_response({"object": "list", "data": cards})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self.names.asked({"model": name})
        return web.json_response(self._card(name))

    async def _version(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"version": importlib.metadata.version("cg")})

    def _card(self, name: str) -> dict[str, Any]:
        length = self.job.limits.context if self.job.limits is not None else None
        root = self.names.model[0]
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "cg",
            "root": root,
            "max_model_len": length,
        } | ({"parent": root} if name in self.names.adapters else {})

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        payload = await self._body(request)
        limits = self._check_open()

        def work() -> list[int]:
            body = protocol.parse(payload)
            self.names.asked(body)
            if "messages" in body:
                options = protocol.template_options(body)
                return self.text.encode_chat(messages(body), options)
            prompt = fields.required(body, "prompt", "a text, or messages")
            if not isinstance(prompt, str):
                raise ApiError(400, "prompt must be a string", "prompt", "invalid_value")
            return self.text.encode(prompt, fields.boolean(body, "add_special_tokens", True))

        tokens = await self._in_thread(work, payload)
        return web.json_response(
            {"tokens": tokens, "count": len(tokens), "max_model_len": limits.context}
        )

    async def _pooling(self, request: web.Request) -> web.StreamResponse:
        payload, reader, api = await self._body(request), self.reader, POOLING[request.path]
        if reader is None:
            message = (
                f"{request.path} needs a model that pools, and '{self.names.model[0]}' draws tokens"
            )
            raise ApiError(404, message, code="model_not_supported")
        limits = self._check_open()
        asked = await self._in_thread(
            lambda: reader.read(api, protocol.parse(payload), limits), payload
        )
        if not self.admission.enter(1, asked.tokens):
            raise ApiError(429, "too many requests; try again later", code="rate_limit_exceeded")
        try:
            self._check_open()
            return await self.pooled.answer(request, asked)
        finally:
            self.admission.leave(1, asked.tokens)

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        body = protocol.parse(await self._body(request))
        limits = self._check_open()
        self.names.asked(body)
        tokens = protocol.token_ids(
            fields.required(body, "tokens", "a list of token ids"), "tokens", limits
        )
        return web.json_response({"prompt": self.text.decode(tokens)})

    # -- what all of them need ---------------------------------------------------------------------

    @web.middleware
    async def _answer(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Check the key, and turn exceptions into errors of OpenAI's shape."""
        headers: dict[str, str] = {}
        try:
            if self._is_preflight(request):
                return web.Response(status=204)
            self._check_key(request)
            response = await handler(request)
            self.metrics.responses[response.status] += 1
            return response
        except ApiError as raised:
            error = raised
        except web.HTTPException as raised:
            error = ApiError(raised.status, raised.reason)
            headers = {name: raised.headers[name] for name in ("Allow",) if name in raised.headers}
        except Exception:
            log.exception("%s %s has failed", request.method, request.path)
            error = ApiError(500, "the server has failed at this request")
        self.metrics.responses[error.status] += 1
        if error.status in (429, 503):
            headers["Retry-After"] = "1"
        response = web.json_response(error.body(), status=error.status, headers=headers)
        if error.status in (408, 413):
            response.force_close()
        return response

    def _is_preflight(self, request: web.Request) -> bool:
        """True for the question of a browser whether a page may ask, which has no key."""
        asked = request.headers.get("Access-Control-Request-Method")
        return request.method == "OPTIONS" and asked is not None and self._allows(request)

    def _allows(self, request: web.Request) -> bool:
        origin = request.headers.get("Origin")
        return origin is not None and bool(self._origins & {origin, "*"})

    async def _let_pages_ask(self, request: web.Request, response: web.StreamResponse) -> None:
        """Tell browsers which pages may read an answer (Fetch Standard, CORS protocol)."""
        if self._allows(request):
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Vary"] = "Origin"
            if self._is_preflight(request):
                response.headers["Access-Control-Allow-Methods"] = "GET, POST"
                response.headers["Access-Control-Allow-Headers"] = "Authorization, Content-Type"
                response.headers["Access-Control-Max-Age"] = "600"

    def _check_key(self, request: web.Request) -> None:
        if self._key is None or not request.path.startswith(CLOSED):
            return
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        shown = key.strip().encode("utf-8", "surrogateescape")
        if kind.lower() != "bearer" or not hmac.compare_digest(shown, self._key):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    def _check_open(self) -> Limits:
        """The engine's limits, if there is one that takes requests."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down")
        if self.job.state is not State.READY or self.job.limits is None:
            raise ApiError(503, f"the engine is {self.job.state.value}; try again later")
        return self.job.limits

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self.bounds.read):
                return await request.read()
        except TimeoutError:
            raise ApiError(408, "the body has not come in time") from None
        except web.HTTPRequestEntityTooLarge:
            message = f"the body has more than {self.bounds.body} bytes"
            raise ApiError(413, message) from None
        except (web.RequestPayloadError, ValueError) as error:
            raise ApiError(400, f"the body cannot be read: {error}"[:300]) from None

    async def _in_thread(self, work: Callable[[], Any], payload: bytes) -> Any:
        """Do work here, or in the thread for tokenizing if the body is large."""
        if len(payload) < LARGE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)
