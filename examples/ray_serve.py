"""Replicas of a server behind Ray Serve, each with an engine of its own (pip install 'draftree[serve,ray]').

    serve run examples.ray_serve:app model=smollm2 replicas=2

answers at http://127.0.0.1:8000/v1 as one ``draftree serve`` would.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI
from ray import serve

import draftree
from draftree.engine.engine import Engine
from draftree.engine.scheduler import SchedulerParams
from draftree.server.app import Server, ServerSettings
from draftree.server.engine_loop import EngineLoop
from draftree.server.metrics import Metrics


def app(arguments: Mapping[str, str]) -> serve.Application:
    """What Ray Serve runs; ``arguments``: ``model``, ``drafter`` and ``replicas``."""

    def endpoints() -> FastAPI:
        """Of one replica, in whose process this is called."""
        speculation, metrics = draftree.SpeculationParams(drafter=arguments.get("drafter", "auto")), Metrics()
        target = draftree.load(arguments.get("model", "smollm2"))
        engine = Engine(target, speculation, observers=[metrics], scheduling=SchedulerParams(prefixes=8))
        settings = ServerSettings(name=target.capabilities.name, speculation=speculation)
        return Server(EngineLoop(lambda: engine), settings, metrics).app

    replica = serve.deployment(serve.ingress(endpoints)(), num_replicas=int(arguments.get("replicas", "2")))
    return replica.options(max_ongoing_requests=264).bind()  # as many as run and wait in one server
