"""Without torch and transformers: GGUF files run, and what cannot run names the extra in one line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from typing import Any

import pytest

from ..published import Recipe
from ..tiny_gguf import write

RUN = """
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))  # an import of these fails
from draftree.cli.main import run
from draftree.models import measuring
measuring._AGREE = float("inf")  # a tiny model's passes are not steady on a busy machine
found = {}
for line in sys.stdin:
    command, text = json.loads(line)
    out, sys.stdin = io.StringIO(), io.StringIO(text)
    from draftree import progress
    progress.out.file = progress.err.file = out
    with contextlib.redirect_stdout(out):
        code = run(command)
    found[" ".join(command)] = code, out.getvalue()
json.dump(found, sys.__stdout__)
"""
LARGE = "torch,transformers,tokenizers,huggingface_hub,accelerate,xllamacpp,llama_cpp"
RUNS = {
    "--help": "generate",
    "--version": "draftree 0",
    "methods": "opt-tree",
    "info tiny.gguf": "native",
    "generate the --target tiny.gguf --max-tokens 4": "drafted",
    "generate the --target tiny.gguf --max-tokens 4 --drafter lookup --method opt-tree": "lookup, opt-tree",
    "generate the --target tiny.gguf --temperature 1 --verify multi-round --method static": "multi-round",
    "generate the --target tiny.gguf --max-tokens 4 --beams 2": "beams",
    "generate the --target tiny.gguf --max-tokens 4 --drafter tiny.gguf --method chain": "tiny.gguf, chain",
    "generate the --target tiny.gguf --max-tokens 4 --regex a+": "a",
    "generate the --target tiny.gguf --max-tokens 8 --drafter head-eagle --method opt-tree --nodes 4": "head-eagle",
    "generate the --target tiny.gguf --max-tokens 8 --drafter lookup+head-eagle3 --temperature 1": "head-eagle3",
    "info head-eagle3": "EAGLE-3",
    "chat tiny.gguf --max-tokens 4": "4 tokens",
    "batch in.jsonl out.jsonl --target tiny.gguf": "1 lines answered",
    "profile tiny.gguf": "milliseconds",
    "bench --target tiny.gguf --suite in.jsonl --out run --methods opt-tree,beams:width=2 --max-tokens 4": "opt-tree",
    "report run": "Speed-up",
    "serve --help": "Serve a model",
}
"""What each of these prints."""
KINDS = ("eagle", "eagle3")
REFUSED = {
    "generate the --target some/model": "no model 'some/model': not a known name (smollm2)",
    "generate the --target nonsuch": "no model 'nonsuch': not a known name (smollm2), not a folder",
    "generate the --target tiny.gguf --drafter nonsuch": "no drafter 'nonsuch': not one of auto, lookup, head, self",
    "generate the --target tiny.gguf --drafter lookup+nonsuch": "no drafter 'nonsuch'",
    "generate the --target folder": "folder on backend transformers needs torch",
    "generate the --target tiny.gguf --backend transformers": "tiny.gguf on backend transformers needs torch",
    "generate the --target smolm2": "did you mean smollm2?",
    "generate the --target tiny.gguf --drafter folder": "folder on backend transformers needs torch",
    "generate the --target tiny.gguf --drafter pickled": "the pickle pickled/pytorch_model.bin needs torch",
    "info folder": "folder on backend transformers needs torch",
    "bench --target tiny.gguf --suite in.jsonl --out peers --methods peer:hf-generate": "peer:hf-generate needs torch",
    "train head smollm2": "draftree train needs torch",
    "calibrate --target tiny.gguf": "draftree calibrate needs torch",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and text of each command, of one process."""
    folder = tmp_path_factory.mktemp("small")
    write(folder / "tiny.gguf")
    heads = {
        kind: Recipe(kind=kind, width=16, wide=64, vocab=274, target_size=128, size=128, drafted=None) for kind in KINDS
    }
    for kind, recipe in heads.items():
        recipe.save(folder / f"head-{kind}", "speculators" if kind == "eagle3" else "midlayer")
    heads["eagle3"].save(folder / "pickled", pickled=True)
    (folder / "folder").mkdir()
    (folder / "in.jsonl").write_text('{"prompt": "the", "max_tokens": 4}\n')
    lines = "".join(json.dumps([shlex.split(command), "the\n/exit\n"]) + "\n" for command in [*RUNS, *REFUSED])
    env = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-c", RUN, LARGE]
    done = subprocess.run(command, cwd=folder, input=lines, capture_output=True, text=True, env=env)  # noqa: S603 - the code above
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return {command: tuple(result) for command, result in results.items()}


@pytest.mark.parametrize("command", RUNS)
def test_gguf_files_run(found: dict[str, tuple[int, str]], command: str) -> None:
    code, text = found[command]
    assert code == 0, text
    assert RUNS[command] in text


@pytest.mark.parametrize("command", REFUSED)
def test_what_needs_torch_names_the_extra(found: dict[str, tuple[int, str]], command: str) -> None:
    code, text = found[command]
    assert (code, text.count("\n")) == (2, 1), text
    assert REFUSED[command] in text
    assert "needs" not in text or "pip install 'draftree[torch]'" in text
    assert "nonsuch" not in command or "no model 'nonsuch'" in text


def test_help_loads_no_command() -> None:
    code = "import sys; from draftree.cli.main import run; run(['--help']); run(['--nope']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603 - the code above
    assert not {"numpy", "pydantic", "draftree.config"} & set(done.stdout.split())
