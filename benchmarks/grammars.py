"""JSON answers under a schema: what drafts gain over AR decoding, how often forced tokens are right, what masks cost.

    python -m benchmarks.grammars TARGET [--drafters lookup,auto] [--method auto] [--answers 3]

Every answer is decoded by AR decoding and with each drafter, one after the other, in an order that turns; ids must be
equal. "forced": places where the grammar forces a string, and the share of them where the target took the token that
drafters get (``ConstraintState.forced``). "masks": seconds that finding masks takes for an answer's tokens,
over those of AR decoding's passes.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from typing import Any

from draftree.bench.summary import markdown
from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.engine.speculation import SpeculationParams
from draftree.models.loading import load
from draftree.sampling.grammar import Grammar
from draftree.text.encoding import user

from .commands import command_parser, one_line_errors

TEXT, COUNT = {"type": "string", "maxLength": 40}, {"type": "integer", "minimum": 0, "maximum": 999}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "a dog": _object(name=TEXT, age_in_years=COUNT, favourite_food=TEXT, is_friendly={"type": "boolean"}),
    "a book": _object(
        title=TEXT, author=TEXT, publication_year=COUNT, genre={"enum": ["fiction", "science", "history"]}
    ),
    "a city": _object(city_name=TEXT, country=TEXT, population_in_thousands=COUNT, has_river={"type": "boolean"}),
    "a meal": _object(
        dish=TEXT,
        ingredients={"type": "array", "items": _object(ingredient=TEXT, grams=COUNT), "minItems": 3, "maxItems": 3},
        vegetarian={"type": "boolean"},
    ),
    "an order": _object(
        customer=_object(first_name=TEXT, last_name=TEXT),
        items={"type": "array", "items": _object(product=TEXT, quantity=COUNT), "minItems": 2, "maxItems": 2},
        status={"enum": ["open", "paid", "delivered"]},
    ),
    "a film": _object(title=TEXT, director=TEXT, running_time_in_minutes=COUNT, rating={"enum": ["good", "bad"]}),
}


def _forced(grammar: Grammar, ids: list[int]) -> tuple[int, int, float]:
    """Places of an answer where something is forced, those where the guess is right, and seconds of all its masks."""
    state, places, right, seconds = grammar.start(), 0, 0, 0.0
    for token in ids:
        if (guess := state.forced) is not None:
            places, right = places + 1, right + (guess == token)
        began = time.perf_counter()
        _ = state.mask
        after = state.after(token)
        seconds += time.perf_counter() - began
        if after is None:
            raise RuntimeError(f"token {token} does not fit")
        state = after
    return places, right, seconds


@one_line_errors()
def main() -> None:
    """Measure and print."""
    parser = command_parser("benchmarks.grammars", __doc__)
    parser.add_argument("target")
    parser.add_argument("--drafters", default="lookup,auto", help="with commas")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--answers", type=int, default=3, help="to each of the schemas, sampled")
    args = parser.parse_args()
    target = load(args.target)
    engines = {"AR": Engine(target)}
    for drafter in args.drafters.split(","):
        engines[drafter] = Engine(target, SpeculationParams(drafter=drafter, method=args.method))
    seconds, steps, tokens = defaultdict[str, float](float), defaultdict[str, int](int), 0
    places, right, masks, verify = 0, 0, 0.0, 0.0
    for number, (what, schema) in enumerate(SCHEMAS.items()):
        grammar = engines["AR"].grammars.json_schema(schema)
        for seed in range(args.answers):
            params = SamplingParams(max_tokens=200, temperature=0.8, seed=seed, constraint=grammar)
            prompt, ids = user(f"Describe {what} as JSON by this schema: {json.dumps(schema)}"), dict[str, list[int]]()
            turn = (number * args.answers + seed) % len(engines)
            order = [*engines][turn:] + [*engines][:turn]
            for name in order:
                found = engines[name].generate([prompt], params)[0]
                s = found.stats.seconds
                ids[name] = found.token_ids
                seconds[name] += s.total - s.prefill
                steps[name] += found.stats.steps
                verify += s.verify if name == "AR" else 0.0
            if any(other != ids["AR"] for other in ids.values()):
                sys.exit(f"error: ids differ for {what}, seed {seed}")
            tokens += len(ids["AR"]) - 1
            one = _forced(grammar, ids["AR"])
            places, right, masks = places + one[0], right + one[1], masks + one[2]
    rows = [
        [name, f"{tokens / seconds[name]:.1f}", f"{seconds['AR'] / seconds[name]:.2f}", f"{tokens / steps[name]:.2f}"]
        for name in engines
    ]
    print(markdown(["drafter", "tokens/s after the prefill", "over AR", "MAL"], rows))
    print(f"{tokens} tokens; forced at {places} of them, the guess is right at {right / max(1, places):.2f} of these")
    print(f"masks take {masks / verify:.3f} of AR decoding's passes")


if __name__ == "__main__":
    main()
