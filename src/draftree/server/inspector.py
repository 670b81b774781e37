"""The inspector: a page that shows what drafting did, and what it reads beside answers with their traces."""

from __future__ import annotations

import asyncio
from pathlib import PurePath
from typing import Any

from fastapi import APIRouter, Response
from starlette.exceptions import HTTPException

from ..engine.engine import Engine
from ..engine.speculation import SpeculationParams
from ..engine.trace import Record, plain
from ..page.show import page_files
from ..policies.methods import METHODS

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def inspector(model: str, engine: Engine, speculation: SpeculationParams, run: Record) -> APIRouter:
    """The endpoints of the page.

    Args:
        model: its name, as clients call it.
        speculation: how requests are drafted for that do not say.
        run: the first line of a trace.
    """
    router, policy = APIRouter(), engine.speculation.drafter.policy

    @router.get("/", include_in_schema=False)
    @router.get("/page/{name:path}", include_in_schema=False)
    async def page(name: str = "index.html") -> Response:
        """Return a file of the page."""
        files = await asyncio.to_thread(page_files)
        if name not in files:
            raise HTTPException(404, f"the page has no file {name!r}")
        return Response(files[name], media_type=_TYPES[PurePath(name).suffix], headers=_HEADERS)

    @router.get("/draftree/about")
    async def about() -> dict[str, Any]:
        """Describe what is served, the cost profile of ``auto`` and its state; null: this server has none."""
        report = policy.report if policy else None
        return {
            "model": model,
            "drafter": str(speculation.spec),
            "method": str(speculation.method),
            "methods": list(METHODS),
            "run": run,
            "cost": plain(report.target.points) if report and report.target else None,
            "auto": report.text() if report else None,
        }

    return router
