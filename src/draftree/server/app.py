"""The HTTP endpoints: OpenAI's, and those for operators."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from ..config import MAX_NODES
from ..engine.speculation import EngineRequest, SpeculationParams
from ..engine.trace import RequestTrace, plain, run_record
from ..errors import DraftreeError, FieldError, QueueFullError
from ..openai.answers import AnswerBuilder
from ..openai.bad_bodies import UnsupportedError, check_model
from ..openai.chat_api import TEMPLATE_WRITES, ChatRequest, TokenizeRequest
from ..openai.choices import Choices, decoded, tokenizer_of
from ..openai.messages_api import Counted, MessageChat, MessagesRequest, answer_builder
from ..openai.responses_api import ResponsesRequest
from ..openai.schema import CompletionRequest, DetokenizeRequest, Sampled
from ..text.encoding import Prompt
from .engine_loop import EngineLoop, Submission
from .inspector import inspector
from .metrics import Metrics, log_request
from .middleware import DOCUMENTED, MESSAGES, UNAVAILABLE, Limits, refuse
from .streams import EventStream
from .work_queue import WorkQueue

T = TypeVar("T")
_GONE = 499
"""Status of what nobody reads, for the log."""
_SHORT = 1 << 16
"""Bytes of a body whose text is read in some milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What a server is started with.

    Attributes:
        name: of the model, as clients call it.
        speculation: how requests are drafted for that do not say.
        keys: any of these opens the endpoints; none: everybody may.
        origins: of web pages that may send requests (CORS).
        hosts: names by which clients call it, beside addresses and localhost, where there is no key; "*": any.
        most_body: bytes of a request.
        timeout: seconds in which a request has to end that names no fewer; None: any.
        most_nodes: drafted tokens of one request's tree at a step.
    """

    name: str
    speculation: SpeculationParams
    keys: Sequence[str] = field(default=(), repr=False)
    origins: Sequence[str] = ()
    hosts: Sequence[str] = ()
    most_body: int = 4 << 20
    timeout: float | None = None
    most_nodes: int = MAX_NODES


class Server:
    """The endpoints of one engine; ``app`` is the ASGI application.

    Attributes:
        loop: of its engine.
        draining: it is to end: new requests are refused, those under way go on.

    Args:
        loop: runs from when the application starts until it ends; its engine has ``metrics`` among its observers.
    """

    def __init__(self, loop: EngineLoop, settings: ServerSettings, metrics: Metrics) -> None:
        self.loop, self._engine, self._settings, self._metrics = loop, loop.engine, settings, metrics
        self._described = {
            "id": settings.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "draftree",
            "max_model_len": self._engine.target.capabilities.max_length,
            "root": settings.name,  # vLLM's clients take the model's name from it
        }
        self.draining = False
        self._grammars, self._long = WorkQueue("grammars", 2, 64), WorkQueue("long texts", 2, 16)
        self.app = app = FastAPI(
            title="draftree", version=version("draftree"), lifespan=self._lifespan, responses=DOCUMENTED
        )
        app.add_middleware(Limits, keys=settings.keys, hosts=settings.hosts, most_body=settings.most_body)
        origins = list(settings.origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        for kind in (RequestValidationError, HTTPException, DraftreeError, Exception):
            app.add_exception_handler(kind, refuse)
        app.post("/v1/chat/completions")(self.chat)
        app.post("/v1/completions")(self.completions)
        app.post("/v1/responses")(self.responses)
        app.post(MESSAGES)(self.messages)
        app.post(f"{MESSAGES}/count_tokens")(self.count_tokens)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/tokenize")(self.tokenize)
        app.get("/tokenizer_info")(self.tokenizer_info)
        app.post("/detokenize")(self.detokenize)
        app.get("/health")(self.health)
        app.get("/ready")(self.ready)
        app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})(self.figures)
        app.get("/version")(self.about)
        labels = {"method": str(settings.speculation.method)}
        self._run = plain(run_record(loop.engine.target, loop.engine.speculation, labels))
        app.include_router(inspector(settings.name, loop.engine, settings.speculation, self._run))

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.loop.start()
        try:
            yield
        finally:
            for queue in (self._grammars, self._long):
                queue.stop()
            await self.loop.stop()

    # OpenAI's endpoints.

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a chat (OpenAI's Chat Completions)."""
        return await self._answer(body, request)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continue texts (OpenAI's Completions)."""
        return await self._answer(body, request)

    async def models(self) -> dict[str, Any]:
        """List the one model that is served."""
        return {"object": "list", "data": [self._described]}

    async def model(self, name: str) -> dict[str, Any]:
        """Describe the served model; other names are not found."""
        check_model(name, self._settings.name)
        return self._described

    async def responses(self, body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation (OpenAI's Responses, without stored state)."""
        return await self._answer(body, request)

    async def messages(self, body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation (Anthropic's Messages)."""
        return await self._answer(await _chat_of(body, request), request)

    async def count_tokens(self, body: Counted, request: Request) -> dict[str, int]:
        """Count the tokens of a conversation, tools included (Anthropic's Messages)."""
        check_model(body.model, self._settings.name)
        chat = await _chat_of(body, request)
        with chat.named():
            (prompt,) = chat.prompts()
            ids = await self._worked(request, None, self._engine.inputs.encode, prompt)
        return {"input_tokens": len(ids)}

    async def _answer(self, body: Sampled, request: Request) -> Response:
        if self.draining:
            raise HTTPException(503, "this server is ending: ask another", UNAVAILABLE)
        check_model(body.model, self._settings.name)
        try:
            return await _unless_gone(request, self._answered(body, request))
        except QueueFullError:
            self._metrics.rejected.inc()
            raise

    async def _answered(self, body: Sampled, request: Request) -> Response:
        key, engine, tokenizer = body.prefix + secrets.token_hex(16), self._engine, self._engine.inputs.tokenizer
        with body.named():
            queue = self._grammars if body.compiles else None
            chosen = (self._settings.speculation, self._settings.most_nodes)
            choices = await self._worked(request, queue, Choices, body, engine, *chosen)
            asked = choices.asked if body.traced else ()
            traces = [RequestTrace(index, tokenizer, () if index else (self._run,)) for index, _ in enumerate(asked)]
            submission, builder = await self._submitted(key, choices, traces, request)
        try:
            if not body.stream:
                await submission.end()
                return await asyncio.to_thread(lambda: JSONResponse(builder.whole()))
        except BaseException:
            submission.cancel()
            raise
        return EventStream(submission, builder, traces)

    async def _worked(self, request: Request, queue: WorkQueue | None, call: Callable[..., T], *args: Any) -> T:
        """Call a function off the event loop. Work on large bodies waits in a queue of its own."""
        if queue is None and len(await request.body()) > _SHORT:
            queue = self._long
        return await (asyncio.to_thread(call, *args) if queue is None else queue.run(call, *args))

    async def _submitted(
        self, key: str, choices: Choices, traces: Sequence[RequestTrace], request: Request
    ) -> tuple[Submission, AnswerBuilder]:
        method = str((choices.speculation or self._settings.speculation).method)

        def ended(choice: int, request: EngineRequest) -> None:
            self._metrics.ended(request)
            log_request(request, key, choice, method)

        timeout = min((t for t in (choices.body.timeout, self._settings.timeout) if t is not None), default=None)
        self.loop.check()
        if choices.speculation is not None:
            await asyncio.wrap_future(self._engine.prepared(choices.speculation))
        requests, builder = await self._worked(request, None, self._begun, key, choices, traces)
        return self.loop.submit(requests, ended, choices.body.priority, timeout), builder

    def _begun(
        self, key: str, choices: Choices, traces: Sequence[RequestTrace]
    ) -> tuple[list[EngineRequest], AnswerBuilder]:
        requests = choices.requests(traces)
        return requests, answer_builder(key, self._settings.name, choices, requests)

    # For operators.

    async def tokenize(self, body: TokenizeRequest, request: Request) -> dict[str, Any]:
        """Return the token ids of a text, or of a conversation in the chat template's form."""
        given = [text for text in (body.prompt, body.content, body.messages) if text is not None]
        if len(given) != 1:
            raise FieldError("prompt", "give one of prompt, content and messages")
        (text,) = given
        prompt: Prompt = text if isinstance(text, str) else body.conversation()
        special = body.add_special if body.add_special_tokens is None else body.add_special_tokens
        if body.messages is not None and special:
            raise UnsupportedError("add_special_tokens", TEMPLATE_WRITES)
        if special is None and body.content is not None:
            special = False
        inputs, bare = self._engine.inputs, bool(text) and special is False
        encode: Callable[[Any], list[int]] = inputs.spelled if bare else inputs.encode
        with body.named():
            ids = await self._worked(request, None, encode, prompt)
        return {"tokens": ids, "count": len(ids), "max_model_len": self._engine.target.capabilities.max_length}

    async def tokenizer_info(self) -> dict[str, Any]:
        """Return the special tokens and the chat template, for clients that count tokens."""
        tokenizer = tokenizer_of(self._engine)
        template, named = tokenizer.chat_template, tokenizer.special_tokens_map
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "chat_template": template.get("default") if isinstance(template, dict) else template,
            **{name: named.get(name) for name in ("bos_token", "eos_token", "pad_token")},
        }

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> dict[str, str]:
        """Return the text of token ids."""
        vocabulary = self._engine.target.capabilities.vocab_size
        if out := next((token for token in body.tokens if token >= vocabulary), None):
            raise FieldError("tokens", f"token {out}: use ids from 0 to {vocabulary - 1}")
        text = await self._worked(request, None, decoded, self._engine, body.tokens)
        return {"prompt": text, "content": text}  # as vLLM calls it, and llama.cpp

    async def health(self) -> Response:
        """Report liveness: 200 while the engine makes steps, else 503."""
        if self.loop.alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": f"the engine has ended: {self.loop.failure}"}, 503)

    async def ready(self) -> Response:
        """Report readiness: 200 while requests are taken, else 503."""
        return JSONResponse({"status": "draining"}, 503) if self.draining else await self.health()

    async def figures(self) -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(self._metrics.text(self._engine), media_type="text/plain; version=0.0.4")

    async def about(self) -> dict[str, str]:
        """Return the version of draftree."""
        return {"version": version("draftree")}


async def _chat_of(body: Counted, request: Request) -> MessageChat:
    """The chat that a message stands for; what is wrong with it is wrong with the body."""
    try:
        return body.chat()
    except ValidationError as error:
        errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(errors, body=await request.json()) from None


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return a coroutine's answer; cancel it when the client leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
        return Response(status_code=_GONE) if working.cancelled() else working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
