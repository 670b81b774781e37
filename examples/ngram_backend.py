"""A target model of one's own, behind the protocol that the engine decodes by: n-grams of bytes, which need no weights.

python examples/ngram_backend.py
"""

from collections import Counter
from collections.abc import Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

import draftree


class NgramModel(draftree.LanguageModel):
    """Predicts by what has followed the last bytes in a text; tokens are bytes, and it has no longest sequence.

    Args:
        text: that it learns.
        order: longest context.
    """

    def __init__(self, text: bytes, order: int = 5) -> None:
        self._counts: dict[bytes, Counter[int]] = {}
        for at in range(len(text)):
            for length in range(min(order, at) + 1):
                self._counts.setdefault(text[at - length : at], Counter())[text[at]] += 1
        self._order, self._numbers = order, count()
        self._ids: dict[draftree.Row, list[int]] = {}
        self._nodes: dict[draftree.Row, list[int]] = {}
        self.capabilities = draftree.Capabilities(
            name="ngrams",
            architecture="NgramModel",
            parameters=len(self._counts),
            max_length=1 << 20,
            max_length_reason="a million bytes are enough",
            vocab_size=256,
            eos_ids=frozenset(),
            dtype="float32",
            device="cpu",
            engine="ngrams 1",
            tier="torch",
            threads=1,
            weights=len(self._counts),
            weight_bytes=8 * len(self._counts),
        )

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """[256] logits of what follows: counts of all contexts, each byte of context weighing a hundredfold."""
        weights = np.full(256, 1e-6)
        for length in range(min(self._order, len(ids)) + 1):
            for token, times in self._counts.get(bytes(ids[len(ids) - length :]), Counter()).items():
                weights[token] += times * 100.0**length
        logits: NDArray[np.float32] = np.log(weights).astype(np.float32)
        return logits

    def holds(self, lengths: Sequence[int]) -> bool:
        return True

    def reserve(self, rows: int, tokens: int) -> None:
        """Nothing to reserve."""

    def open(self) -> draftree.Row:
        row = draftree.Row(number=next(self._numbers))
        self._ids[row], self._nodes[row] = [], []
        return row

    def extend(self, rows: Sequence[draftree.Row], nodes: Sequence[draftree.Nodes]) -> draftree.Scores:
        found = list[NDArray[np.float32]]()
        for row, new in zip(rows, nodes, strict=True):
            self._nodes[row] += new.tokens
            row.parents += new.parents
            there = len(self._nodes[row])
            found += [self.logits(self._path(row, node)) for node in range(there - new.scored, there)]
        return draftree.NumpyScores(np.reshape(found, (-1, 256)), [new.scored for new in nodes])

    def _path(self, row: draftree.Row, node: int) -> list[int]:
        """All tokens down to a node."""
        below = list[int]()
        while node >= 0:  # -1 is the last committed token
            below.append(self._nodes[row][node])
            node = row.parents[node]
        return self._ids[row] + below[::-1]

    def commit(self, row: draftree.Row, path: Sequence[int]) -> None:
        row.check_path(path)
        self._keep(row, path, len(path), [])

    def prune(self, row: draftree.Row, keep: Sequence[int], trunk: int) -> None:
        self._keep(row, keep, trunk, row.pruned(keep, trunk))

    def _keep(self, row: draftree.Row, nodes: Sequence[int], trunk: int, parents: list[int]) -> None:
        tokens = [self._nodes[row][node] for node in nodes]
        self._ids[row] += tokens[:trunk]
        self._nodes[row] = tokens[trunk:]
        row.length, row.parents = len(self._ids[row]), parents

    def fork(self, row: draftree.Row, length: int | None = None) -> draftree.Row:
        other = self.open()
        self._ids[other] = self._ids[row][: row.prefix(length)]
        other.length = len(self._ids[other])
        return other

    def close(self, row: draftree.Row) -> None:
        del self._ids[row], self._nodes[row]


if __name__ == "__main__":
    with open(__file__, "rb") as file:
        text = b" ".join(file.read().split())
    speculation = draftree.SpeculationParams(drafter="lookup", method="opt-tree", nodes=8)
    engine = draftree.Engine(NgramModel(text), speculation)
    answer = engine.generate([[*text]], draftree.SamplingParams(max_tokens=200, temperature=0.5, seed=1))[0]
    print(bytes(answer.token_ids).decode(), f"\n{answer.stats.mal:.2f} tokens a pass of the target")
