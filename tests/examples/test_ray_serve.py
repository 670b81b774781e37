"""The example for Ray Serve: two replicas answer as the engine does, whole and as a stream."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftree.config import SamplingParams
from draftree.engine.engine import Engine

from ..server.running import TEXT, target
from ..tiny import save_tiny

ROOT = Path(__file__).parents[2]
ASK = """
import json, socket, sys, urllib.request
import ray
from ray import serve
from examples.ray_serve import app

with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
try:
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app({"model": sys.argv[1], "drafter": "lookup", "replicas": "2"}))
    url = f"http://127.0.0.1:{port}/v1/"
    model = json.load(urllib.request.urlopen(url + "models"))["data"][0]["id"]
    asked = {"model": model, "prompt": sys.argv[2], "max_tokens": 24, "temperature": 0}
    found = []
    for body in [asked] * 4 + [asked | {"stream": True}]:
        request = urllib.request.Request(url + "completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        found.append(urllib.request.urlopen(request).read().decode())
finally:
    serve.shutdown()
    ray.shutdown()
print(json.dumps(found))
"""


@pytest.mark.ray
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is missing: pip install 'draftree[ray]'")
def test_replicas_answer_as_the_engine_does(tmp_path: Path) -> None:
    expected = Engine(target()).generate([TEXT], SamplingParams(max_tokens=24))[0].text
    model = save_tiny(tmp_path / "tiny")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", ASK, str(model), TEXT]
    made = subprocess.run(command, env=environment, capture_output=True, text=True)  # noqa: S603
    assert made.returncode == 0, made.stderr
    *answers, stream = json.loads(made.stdout.splitlines()[-1])
    assert [json.loads(answer)["choices"][0]["text"] for answer in answers] == [expected] * 4
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    assert stream.rstrip().endswith("data: [DONE]")
