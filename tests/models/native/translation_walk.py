"""Draft with models of other vocabularies in C: run by ``test_draft_models`` over a sanitized library.

python -m tests.models.native.translation_walk LIBRARY FOLDER
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from draftree.config import Budget, SamplingParams
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.fitting import fitted
from draftree.drafters.grow import TreeDrafter
from draftree.models.base import LanguageModel
from draftree.models.native import binding
from draftree.papers.opt_tree import OptTree
from draftree.request import Outcome, Request, StepCost
from draftree.text.detokenizer import NoText
from tests.drafters.test_native_translation import TEXTS, Masks, differing
from tests.models.native.out_of_memory import Memory
from tests.models.vocabularies import models_in, tokenizer_of

STEPS = 2


def draft(memory: Memory, failing: int, number: int, model: LanguageModel, target: LanguageModel) -> list[Any]:
    """The trees and rows of two requests, where in one step a call of the allocator fails; that is begun again."""
    source = ModelSource(model, target.capabilities.vocab_size)
    drafter, found, requests = TreeDrafter(OptTree(1e-9, 3), source), list[Any](), list[Request]()
    drafter.prepare(target)
    for seed, text in enumerate(TEXTS[:2]):
        params = SamplingParams(temperature=0.8 * seed, seed=seed)
        requests.append(Request(tokenizer_of(target).encode(text), params, 10**6, frozenset(), NoText()))
        requests[-1].draws.state = Masks(seed) if seed else None
        source.opened(requests[-1])
    for step in range(STEPS):
        memory.fail(*((number, number) if step == failing else (1, 0)))
        trees = memory.call("draft", lambda: drafter.propose(requests, [Budget(6)] * 2))
        memory.fail(1, 0)
        outcomes = []
        for request, tree in zip(requests, trees, strict=True):
            found.append((tree.tokens, tree.parents, tree.path_logprobs))
            tokens = [int(tree.tokens[0]), 7] if len(tree) else [7]
            outcomes.append(
                Outcome(request, tree, [0][: len(tokens) - 1], tokens, len(tokens), StepCost(1, 0.01, 1.0, 0.0, 0))
            )
            request.ids += tokens
        drafter.observe(outcomes)
        found += [source.opened(request).row.ends for request in requests]  # type: ignore[attr-defined]
    for request in requests:
        drafter.close(request)
    return found


def try_without_memory(model: LanguageModel, target: LanguageModel) -> Counter[str]:
    """Each call of the allocator fails once in a step; how often what has failed."""
    memory = Memory()
    expected = draft(memory, -1, 0, model, target)
    gc.collect()
    begun = memory.library.memory_live()
    for failing in range(STEPS):
        for number in count(1):
            failed = memory.failed.total()
            assert draft(memory, failing, number, model, target) == expected, number
            if memory.failed.total() == failed:
                break
    gc.collect()  # callbacks refer to what they are kept by, and errors to what raised them
    gc.collect()
    assert memory.library.memory_live() == begun, "memory is lost"
    return memory.failed


def main(folder: Path) -> None:
    models = models_in(folder)
    differ, seen = differing(models, range(6), steps=4)
    assert not differ
    model = fitted(models["pieces"], models["tags"])
    gc.collect()
    gc.freeze()
    sys.stdout.write(f"{dict(seen + try_without_memory(model, models['tags']))}\n")


if __name__ == "__main__":
    binding.LIBRARY = Path(sys.argv[1])
    main(Path(sys.argv[2]))
