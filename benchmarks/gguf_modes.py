"""What do llama.cpp's own ways of drafting make? python -m benchmarks.gguf_modes TARGET.gguf SUITE [--mode KIND]

The server of the ``xllamacpp`` package decodes the first prompts of a suite (a name or a file, as ``draftree bench``
takes it) greedily; prints tokens a second after the prompts are read, by llama.cpp's own clock. KIND is none,
ngram_simple, ngram_mod, ngram_cache, or draft_simple with a draft model (``--draft FILE``).
"""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Any

from draftree.bench.suites import choose, load_suite
from draftree.errors import DraftreeError

NONE = "none"
_THREADS = 2


def server(target: str, mode: str, draft: str | None) -> Any:
    """llama.cpp's server of a model."""
    llama: Any = importlib.import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = target, 4096, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = _THREADS
    kinds = llama.common_speculative_type
    if mode != NONE:
        named = {name.lower().rpartition("type_")[2]: name for name in dir(kinds) if "TYPE_" in name}
        if mode not in named:
            raise SystemExit(f"no mode {mode!r}: choose from {', '.join((NONE, *named))}")
        params.speculative.types = [getattr(kinds, named[mode])]
    if draft is not None:
        params.speculative.draft.mparams.path = draft
    return llama.Server(params)


def main() -> None:
    """Decode and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("suite")
    parser.add_argument("--mode", default=NONE)
    parser.add_argument("--draft", help="the draft model of draft_simple")
    parser.add_argument("--limit", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    try:
        items = choose(load_suite(args.suite), limit=args.limit)
    except DraftreeError as error:
        parser.error(str(error))
    running, tokens, seconds = server(args.target, args.mode, args.draft), 0, 0.0
    for item in items:
        asked = {"messages": [{"role": "user", "content": item.turns[0]}], "temperature": 0}
        found = running.handle_chat_completions({**asked, "max_tokens": args.max_tokens})
        times = (json.loads(found) if isinstance(found, (str, bytes)) else found)["timings"]
        tokens, seconds = tokens + times["predicted_n"], seconds + times["predicted_ms"] / 1e3
    print(f"{args.mode}: {tokens / seconds:.1f} tokens/s")


if __name__ == "__main__":
    main()
