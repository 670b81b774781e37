"""The HTTP endpoints: OpenAI's, and those that operators ask."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ..engine.engine import Engine, Generation
from ..engine.speculation import EngineRequest, SpeculationParams
from ..errors import FieldError, InputError, QueueFullError
from ..openai import bad_bodies
from ..openai.answers import CompletionBuilder
from ..openai.bad_bodies import UnknownModelError, UnsupportedError
from ..openai.chat_api import ChatRequest, TokenizeRequest
from ..openai.request_mapping import Choices, decoded, find_choices, system_fingerprint
from ..openai.responses_api import ResponseBuilder, ResponsesRequest
from ..openai.schema import CompletionRequest, DetokenizeRequest, Sampled
from ..text.encoding import Prompt
from .engine_loop import AsyncHandle, EngineLoop, EngineThread
from .inspector import Inspector
from .metrics import Metrics
from .middleware import DOCUMENTED, UNAVAILABLE, Limits, failed, http_error, invalid, wrong
from .request_log import log_request
from .streams import EventStream, LiveTrace, event_line, named_events, pinged

log = logging.getLogger("draftree.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What a server is started with.

    Attributes:
        name: of the model, as clients call it.
        speculation: how requests are drafted for that do not say.
        keys: any of these opens the endpoints; none: everybody may.
        origins: of web pages that may send requests (CORS).
        most_body: bytes of a request.
        timeout: seconds in which a request has to end that names no fewer; None: any.
        log_prompts: prompts and texts are logged too.
    """

    name: str
    speculation: SpeculationParams
    keys: Sequence[str] = field(default=(), repr=False)
    origins: Sequence[str] = ()
    most_body: int = 4 << 20
    timeout: float | None = None
    log_prompts: bool = False


class Server:
    """The endpoints of one engine; ``app`` is the ASGI application.

    Attributes:
        draining: it is to end: new requests are refused, those under way go on.

    Args:
        engine: made with ``metrics`` among its observers; run from when the application starts until it ends.
        thread: as of ``EngineLoop``.
    """

    def __init__(
        self, engine: Engine, settings: ServerSettings, metrics: Metrics, thread: EngineThread | None = None
    ) -> None:
        self._settings, self._metrics = settings, metrics
        self._loop = EngineLoop(engine, thread)
        self._began = int(time.time())
        self.draining = False
        self.app = app = FastAPI(
            title="draftree", version=version("draftree"), lifespan=self._lifespan, responses=DOCUMENTED
        )
        app.add_middleware(Limits, keys=settings.keys, most_body=settings.most_body)
        if settings.origins:
            app.add_middleware(
                CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["*"], allow_headers=["*"]
            )
        app.add_exception_handler(RequestValidationError, invalid)
        app.add_exception_handler(InputError, wrong)
        app.add_exception_handler(HTTPException, http_error)
        app.add_exception_handler(QueueFullError, self._full)
        app.add_exception_handler(Exception, failed)
        app.post("/v1/chat/completions")(self.chat)
        app.post("/v1/completions")(self.completions)
        app.post("/v1/responses")(self.responses)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/tokenize")(self.tokenize)
        app.get("/tokenizer_info")(self.tokenizer_info)
        app.post("/detokenize")(self.detokenize)
        app.get("/health")(self.health)
        app.get("/ready")(self.ready)
        app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})(self.figures)
        app.get("/version")(self.about)
        self._inspector = Inspector(settings.name, engine.setup, settings.speculation, self._spelled)
        app.include_router(self._inspector.router)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self._loop.start()
        try:
            yield
        finally:
            await self._loop.stop()

    @property
    def _engine(self) -> Engine:
        return self._loop.engine

    # OpenAI's endpoints.

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a chat (OpenAI's Chat Completions)."""
        return await self._answer(body, request, chat=True)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continue texts (OpenAI's Completions)."""
        return await self._answer(body, request, chat=False)

    async def models(self) -> dict[str, Any]:
        """List the one model that is served."""
        return {"object": "list", "data": [self._described()]}

    async def model(self, name: str) -> dict[str, Any]:
        """Describe the model."""
        self._check_model(name)
        return self._described()

    def _described(self) -> dict[str, Any]:
        most = self._engine.target.capabilities.max_length
        return {
            "id": self._settings.name,
            "object": "model",
            "created": self._began,
            "owned_by": "draftree",
            "max_model_len": most,
        }

    def _check_model(self, name: str) -> None:
        if name != self._settings.name:
            raise UnknownModelError(name, self._settings.name)

    async def responses(self, body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation (OpenAI's Responses, without stored state)."""
        key = f"resp_{secrets.token_hex(16)}"
        (answer,), choices = await self._submitted(key, body)
        found = [answer]
        builder = ResponseBuilder(key, body, self._settings.name, lambda token: self._text([token]), choices.tags)
        if body.stream:
            return EventStream(found, pinged(named_events(builder.events(answer.handle.request, answer.chunks()))))
        if await _unless_gone(request, _together(found)) is None:
            return Response(status_code=499)
        return JSONResponse(builder.answered(answer.handle.request))

    async def _submitted(self, key: str, body: Sampled) -> tuple[list[AsyncHandle], Choices]:
        """The choices of a request under way.

        Args:
            key: id of the answer.

        Raises:
            HTTPException: the server is to end.
            InputError: a field's value does not do.
            QueueFullError: too many wait.
        """
        if self.draining:
            raise HTTPException(503, "this server is ending: ask another", UNAVAILABLE)
        self._check_model(body.model)
        with body.named():
            return await self._begun(key, body)

    async def _begun(self, key: str, body: Sampled) -> tuple[list[AsyncHandle], Choices]:
        choices = await asyncio.to_thread(find_choices, body, self._engine, self._settings.speculation)
        method = str((choices.speculation or self._settings.speculation).method)
        timeout = min((t for t in (body.timeout, self._settings.timeout) if t is not None), default=None)
        found: list[AsyncHandle] = []
        try:
            for ids, params in choices.asked:
                began = time.monotonic()
                options: dict[str, Any] = {
                    "prediction": body.predicted,
                    "observers": [LiveTrace(len(found))] if body.traced else [],
                    "priority": body.priority,
                    "timeout": timeout,
                    "ended": partial(self._ended, key, len(found), method, began),
                }
                answer = await self._loop.submit(ids, params, choices.speculation, **options)
                self._metrics.arrived(answer.handle.request, began)
                found.append(answer)
        except BaseException:
            for answer in found:
                answer.cancel()
            raise
        return found, choices

    async def _answer(self, body: Sampled, request: Request, *, chat: bool) -> Response:
        key = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        found, choices = await self._submitted(key, body)
        builder = CompletionBuilder(
            key,
            self._settings.name,
            system_fingerprint(self._engine),
            lambda token: self._text([token]),
            chat=chat,
            tags=choices.tags,
            offsets=choices.offsets([answer.handle.request for answer in found]),
        )
        if body.stream:
            return EventStream(found, pinged(self._events(choices, builder, found)))
        generations = await _unless_gone(request, _together(found))
        if generations is None:
            return Response(status_code=499)
        requests = [answer.handle.request for answer in found]
        return JSONResponse(await asyncio.to_thread(choices.whole, builder, requests, generations))

    def _ended(self, key: str, choice: int, method: str, began: float, request: EngineRequest) -> None:
        self._metrics.ended(request)
        prompt = self._text(request.ids[: request.prompt_length]) if self._settings.log_prompts else None
        log_request(request, key, choice, method, time.monotonic() - began, prompt)

    def cancel(self) -> None:
        """End all requests with what they have."""
        self._loop.cancel()

    @property
    def _vocabulary(self) -> int:
        return self._engine.target.capabilities.vocab_size

    def _spelled(self, token: int) -> str:
        if token >= self._vocabulary:
            raise FieldError("tokens", f"token {token}: use ids from 0 to {self._vocabulary - 1}")
        return self._text([token])

    def _text(self, ids: Sequence[int]) -> str:
        return decoded(self._engine, ids)

    async def _events(
        self, choices: Choices, builder: CompletionBuilder, found: Sequence[AsyncHandle]
    ) -> AsyncIterator[str]:
        """Server-sent events of all choices, as their tokens come."""
        body, requests = choices.body, [answer.handle.request for answer in found]
        options = body.stream_options
        with_usage = options is not None and options.include_usage
        queue: asyncio.Queue[dict[str, Any] | None | Exception] = asyncio.Queue()

        def trace(answer: AsyncHandle) -> None:
            for observer in answer.handle.request.observers:
                if isinstance(observer, LiveTrace) and (records := observer.take()):
                    queue.put_nowait(builder.records(records))

        async def choice(index: int, answer: AsyncHandle, before: str) -> None:
            try:
                if (first := builder.first(index)) is not None:
                    queue.put_nowait(first)
                if before:
                    queue.put_nowait(builder.echo(index, before))
                async for chunk in answer.chunks():
                    trace(answer)
                    if (piece := builder.token(index, chunk, always=body.traced)) is not None:
                        if options is not None and options.continuous_usage_stats:
                            piece["usage"] = choices.usage(requests).of_choices
                        queue.put_nowait(piece)
                trace(answer)
                reason = answer.handle.request.finish_reason or "cancelled"
                queue.put_nowait(builder.end(index, reason))
            except Exception as error:  # noqa: BLE001 - the client gets an event of it
                queue.put_nowait(error)
            finally:
                queue.put_nowait(None)

        if body.traced:
            queue.put_nowait(builder.records([self._inspector.run]))
        tasks = [
            asyncio.create_task(choice(index, answer, before))
            for index, (answer, before) in enumerate(zip(found, choices.echoed(requests), strict=True))
        ]
        try:
            left = len(tasks)
            while left:
                event = await queue.get()
                if event is None:
                    left -= 1
                elif isinstance(event, Exception):
                    log.error("a request failed: %s", event)
                    yield event_line(bad_bodies.error(str(event), "server_error"))
                else:
                    yield event_line(({"usage": None} if with_usage else {}) | event)
            if with_usage:
                usage = await asyncio.to_thread(choices.final_usage, requests)
                yield event_line(builder.last(usage, requests))
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()

    # What operators ask.

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a text, or of a conversation as the chat template writes it."""
        if (body.prompt is None) == (body.messages is None):
            raise FieldError("prompt", "give either prompt or messages")
        prompt: Prompt = body.prompt or "" if body.messages is None else body.conversation()
        if body.messages is not None and body.add_special_tokens:
            raise UnsupportedError("add_special_tokens", "a chat template writes its own, leave it out")
        encode: Callable[[Any], list[int]] = self._engine.inputs.encode
        if body.prompt and body.add_special_tokens is False:
            encode = self._engine.inputs.spelled
        with body.named():
            ids = await asyncio.to_thread(encode, prompt)
        return {"tokens": ids, "count": len(ids), "max_model_len": self._engine.target.capabilities.max_length}

    async def tokenizer_info(self) -> dict[str, Any]:
        """Facts about the tokenizer for clients that count tokens: special tokens, chat template."""
        engine, can = self._engine, self._engine.target.capabilities
        first, template = engine.inputs.encode("a")[0], getattr(engine.inputs.tokenizer, "chat_template", None)
        begins = first not in engine.inputs.spelled("a")
        return {
            "tokenizer_class": type(engine.inputs.tokenizer).__name__,
            "chat_template": template.get("default") if isinstance(template, dict) else template,
            "bos_token": self._text([first]) if begins else None,
            "eos_token": self._text([min(can.eos_ids)]) if can.eos_ids else None,
            "pad_token": None,
            "add_bos_token": begins,
            "vocab_size": can.vocab_size,
            "model_max_length": can.max_length,
        }

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        """The text of token ids."""
        if out := next((token for token in body.tokens if token >= self._vocabulary), None):
            raise FieldError("tokens", f"token {out}: use ids from 0 to {self._vocabulary - 1}")
        return {"prompt": await asyncio.to_thread(self._text, body.tokens)}

    async def health(self) -> Response:
        """Liveness: 200 while the engine makes steps, else 503."""
        if self._loop.alive and self._loop.failure is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": f"the engine has ended: {self._loop.failure}"}, 503)

    async def ready(self) -> Response:
        """Readiness: 200 while requests are taken, else 503."""
        return JSONResponse({"status": "draining"}, 503) if self.draining else await self.health()

    async def figures(self) -> Response:
        """Metrics in Prometheus' text format."""
        return Response(self._metrics.text(self._engine), media_type="text/plain; version=0.0.4")

    async def about(self) -> dict[str, str]:
        """Version of draftree."""
        return {"version": version("draftree")}

    async def _full(self, request: Request, error: Exception) -> Response:
        self._metrics.rejected()
        wait = error.retry_after if isinstance(error, QueueFullError) else 1.0
        body = bad_bodies.error(str(error), "rate_limit_error", code="rate_limit_exceeded")
        return JSONResponse(body, 429, {"Retry-After": f"{wait:.0f}"})


async def _together(found: Sequence[AsyncHandle]) -> list[Generation]:
    """The ends of all; where one fails, or the task is cancelled, the others are cancelled."""
    try:
        return [await answer.result() for answer in found]
    finally:
        for answer in found:
            answer.cancel()


async def _unless_gone(request: Request, work: Awaitable[list[Generation]]) -> list[Generation] | None:
    """What the work gives; None: the client has gone, and it was cancelled."""
    doing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        return await doing if doing.done() else None
    finally:
        for task in (doing, watching):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await doing


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
