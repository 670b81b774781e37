"""Does a server speak OpenAI's API as others understand it?

    python -m benchmarks.conformance comply [--target MODEL] [--programs DIR]
    python -m benchmarks.conformance langchain [--target MODEL] [--programs DIR]
    python -m benchmarks.conformance fuzz [--examples 50] [--programs DIR]

Starts ``draftree serve`` and lets programs of others judge it. DIR is the ``bin`` of an environment of their own: pip
install llm-comply langchain-openai langchain-tests pytest-asyncio schemathesis. ``comply``: llm-comply's tests of chats
and of responses; those of images fail, for models here read text. ``langchain``: LangChain's standard tests of a chat
model, through ``ChatOpenAI``; they want right arguments of function calls, so the target has to be able. ``fuzz``:
schemathesis sends what the server's OpenAPI document describes and what it forbids: no answer may be a 5xx, and nothing
that is forbidden may be answered with a 2xx. Answers are short there, and the model's name is the right one, or all
would be refused by it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx2 as httpx

from draftree.models.model_files import DEFAULT_MODEL

from .commands import command_parser, one_line_errors
from .server_load import served

FORMATS = ("openai-chat", "open-responses")
"""Of llm-comply."""
CHECKS = "not_a_server_error,negative_data_rejection,content_type_conformance,response_schema_conformance"
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_LANGCHAIN = """
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestServer(ChatModelIntegrationTests):
    chat_model_class = ChatOpenAI
    supports_json_mode = True
    chat_model_params = {
        **{"model": "model", "base_url": "URL/v1", "api_key": "none"},
        **{"max_tokens": 128, "temperature": 0, "stream_usage": True},
    }
"""


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The document with one model's name and short answers."""
    for schema in document["components"]["schemas"].values():
        properties = schema.get("properties", {})
        if "model" in properties and "model" in schema.get("required", ()):
            properties["model"] = {"const": "model"}
            for name in _LIMITS:
                if name in properties:
                    properties[name] = {"type": "integer", "minimum": 1, "maximum": 4}
                    schema["required"] = [*schema["required"], name]
    return document


def commands(args: argparse.Namespace, url: str, folder: Path) -> list[list[str]]:
    """What is run, with files that it reads in a folder."""
    if args.what == "comply":
        own = ["--base-url", f"{url}/v1", "--model", "model", "--api-key", "none", "--timeout", "600"]
        return [[f"{args.programs}/llm-comply", *own, "--format", kind] for kind in FORMATS]
    if args.what == "langchain":
        (folder / "test_server.py").write_text(_LANGCHAIN.replace("URL", url))
        own = ["-q", "-p", "no:cacheprovider", "--rootdir", str(folder), "-o", "asyncio_mode=auto"]
        for scope in ("test", "fixture"):  # LangChain keeps a client, which lives no longer than its loop
            own += ["-o", f"asyncio_default_{scope}_loop_scope=session"]
        return [[f"{args.programs}/python", "-m", "pytest", *own, str(folder / "test_server.py")]]
    document = folder / "openapi.json"
    document.write_text(json.dumps(narrowed(httpx.get(f"{url}/openapi.json").json())))
    own = ["--url", url, "--checks", CHECKS, "--seed", "1", "--max-examples", str(args.examples)]
    return [[f"{args.programs}/schemathesis", "run", str(document), *own]]


@one_line_errors()
def main() -> None:
    """Start a server and let it be judged."""
    parser = command_parser("benchmarks.conformance", __doc__)
    parser.add_argument("what", choices=("comply", "langchain", "fuzz"))
    parser.add_argument("--programs", type=Path, default=Path(sys.executable).parent)
    parser.add_argument("--examples", type=int, default=50)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--concurrency", type=int, default=4)
    args = parser.parse_args()
    args.programs = args.programs.absolute()
    with served(args.target, args.drafter, args.concurrency) as (url, _), tempfile.TemporaryDirectory() as folder:
        made = commands(args, url, Path(folder))  # they write beside them
        codes = [subprocess.run(command, cwd=folder).returncode for command in made]  # noqa: S603
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
