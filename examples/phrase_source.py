"""A drafter of one's own: it drafts what a text that answers quote, such as a manual, has after the last two tokens.

draftree generate "Repeat the class PhraseBook." --drafter lookup+examples.phrase_source:of_this_file --show-trees
"""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import draftree

Pair = tuple[int, int]


class PhraseBook(draftree.DraftSource):
    """Predicts by how often each token has followed two others in the token ids of a text."""

    name = "phrase-book"

    def __init__(self, ids: Sequence[int]) -> None:
        self._counts: dict[Pair, Counter[int]] = {}
        for before, last, token in zip(ids, ids[1:], ids[2:], strict=False):
            self._counts.setdefault((before, last), Counter())[token] += 1

    def scorer(self, requests: Sequence[draftree.Request], coupled: bool) -> draftree.Scorer:
        return Phrases(self._counts, requests)


class Phrases(draftree.Scorer):
    """The candidates of one proposal's nodes, each by the last two tokens on its path."""

    def __init__(self, counts: dict[Pair, Counter[int]], requests: Sequence[draftree.Request]) -> None:
        self._counts, self._requests = counts, requests
        self._pairs: dict[tuple[int, int], Pair] = {}

    def score(self, nodes: Sequence[draftree.UnscoredNode], width: int) -> list[draftree.Candidates]:
        scored = list[draftree.Candidates]()
        for b, node, parent, token in nodes:
            before, last = self._requests[b].ids[-2:]
            pair = (before, last) if node < 0 else (self._pairs[b, parent][1], token)  # -1 is the root
            self._pairs[b, node] = pair
            found = self._counts.get(pair, Counter())
            logprobs = {token: math.log(count / found.total()) for token, count in found.most_common()}
            entropy = -sum(math.exp(logprob) * logprob for logprob in logprobs.values())
            scored.append(draftree.Candidates([*logprobs][:width], [*logprobs.values()][:width], entropy))
        return scored


def of_this_file(target: draftree.LanguageModel) -> PhraseBook:
    """Made for a target, whose tokens the text is split into."""
    assert target.tokenizer is not None  # noqa: S101 - drafts are its tokens
    return PhraseBook(target.tokenizer.encode(Path(__file__).read_text()))  # or a manual


if __name__ == "__main__":
    target = draftree.load("smollm2")
    drafter = draftree.TreeDrafter(draftree.StaticTree(width=2, depth=4), of_this_file(target))
    engine = draftree.Engine(target, draftree.Speculation(drafter, nodes=8))
    question = draftree.user(f"{Path(__file__).read_text()}\n\nRepeat the class PhraseBook.")
    answer = engine.generate([question], draftree.SamplingParams(max_tokens=100))[0]
    print(answer.text, f"\n{answer.stats.mal:.2f} tokens a pass of the target")
