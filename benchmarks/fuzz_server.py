"""Does a server answer whatever its OpenAPI document allows, and refuse the rest, without failing?

    python -m benchmarks.fuzz_server [--examples 50] [--schemathesis FILE] [--target smollm2]

Starts ``draftree serve`` and lets schemathesis (pip install schemathesis, into an environment of its own) send what the
document describes and what it forbids: no answer may be a 5xx, and nothing that the document forbids may be answered
with a 2xx. Answers are short, and the model's name is the right one, or all would be refused by it.
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

from draftree.models.loading import DEFAULT_MODEL

from .server_load import served

CHECKS = "not_a_server_error,negative_data_rejection,content_type_conformance,response_schema_conformance"
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


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


def main() -> None:
    """Start a server and send."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=50)
    parser.add_argument("--schemathesis", default="schemathesis")
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--concurrency", type=int, default=4)
    args = parser.parse_args()
    with served(args) as (url, _), tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "openapi.json"
        document.write_text(json.dumps(narrowed(httpx.get(f"{url}/openapi.json").json())))
        command = [args.schemathesis, "run", str(document), "--url", url, "--checks", CHECKS, "--seed", "1"]
        ended = subprocess.run([*command, "--max-examples", str(args.examples)])  # noqa: S603
    sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
