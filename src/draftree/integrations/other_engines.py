"""Draft trees for other engines: token ids go in, tokens and their parents come out, without torch; SGLang's plugin.

    proposer = Proposer()                        # one for each request
    tokens, parents = proposer.propose(ids, 16)  # ids: the prompt, and what has been generated

Drafts are continuations of earlier occurrences in the text itself and in a predicted output: what drafter ``lookup``
knows, in trees that grow as everywhere. They have the n most probable paths, which of all trees of n nodes have the
largest expected acceptance length (OPT-Tree, Theorem 3.1).

SGLang (0.5.23) finds ``register`` by the entry point group ``sglang.srt.plugins``:

    python -m sglang.launch_server --model-path MODEL --speculative-algorithm DRAFTREE --speculative-num-draft-tokens 16

Its NGRAM path verifies a tree of fixed size for each request, whose shape is a mask, in CUDA graphs, and moves the
accepted path's keys and values. What it drafts from is replaced here: each request's own text.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import MAX_NODES, Budget, SamplingParams
from ..drafters.grow import TreeDrafter
from ..drafters.ngram import NgramSource
from ..errors import ConfigError
from ..papers.opt_tree import OptTree
from ..policies.base import MAX_WIDTH, GrowthRule, Plan, descending
from ..request import Request
from ..text.detokenizer import NoText
from ..tree import ROOT


@dataclass(slots=True)
class _WidePaths(OptTree):
    """The most probable paths, with at most ``width`` children of a node."""

    width: int = MAX_WIDTH

    def width_for(self, nodes: int) -> int:
        return min(nodes, self.width)

    def rule(self, plan: Plan) -> GrowthRule | None:
        rule = super(_WidePaths, self).rule(plan)
        return rule and rule._replace(width=min(rule.width, self.width))


class Proposer:
    """Drafts for one text that grows.

    Args:
        prediction: token ids of what is likely to follow the prompt.
    """

    def __init__(self, prediction: Sequence[int] = ()) -> None:
        self._prediction = list(prediction)
        self._policy = _WidePaths(delta=sys.float_info.min)
        self._drafter = TreeDrafter(self._policy, NgramSource())
        self._request: Request | None = None

    def propose(
        self, ids: Sequence[int], budget: int, *, width: int | None = None, cost: float = 0.0
    ) -> tuple[list[int], list[int]]:
        """Draft a tree below the last token of a text, as large as pays.

        A node pays, as in ``auto``, where what it is expected to gain, the probability of its path, exceeds the tokens
        that its time makes otherwise: cost x (1 + sum of the paths' probabilities) / (1 + cost x nodes).

        Args:
            ids: the text so far. It is read on from where the last call's ended; where it is another text, from its
                beginning.
            budget: most nodes.
            width: most children of a node; 1 gives a chain. None: any.
            cost: what one more node adds to a pass, over the time of a pass over one token.

        Returns:
            tokens [N] and the numbers of their parents [N], -1 for children of the root, in level order: a parent comes
            before its child. Fewer nodes than the budget where no more is known, or pays.

        Raises:
            ConfigError: a bound is out of range.
        """
        for name, value in (("budget", budget), ("width", width), ("cost", cost)):
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}: use a number, 0 or more")
        self._policy.width = MAX_WIDTH if width is None else width
        if not width and width is not None:
            return [], []
        (tree,) = self._drafter.propose([self._read(list(ids))], [Budget(min(budget, MAX_NODES))])
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        return _paying(tokens, parents, tree.path_logprobs.tolist(), cost) if cost else (tokens, parents)

    def _read(self, ids: list[int]) -> Request:
        request = self._request
        if request is None or ids[: len(request.ids)] != request.ids:
            if request is not None:
                self._drafter.close(request)
            made = Request(ids, SamplingParams(), len(ids), frozenset(), NoText(), self._prediction)
            request = self._request = made
        request.ids = ids
        return request


def _paying(
    tokens: Sequence[int], parents: Sequence[int], paths: Sequence[float], cost: float
) -> tuple[list[int], list[int]]:
    """The nodes of a tree that pay."""
    kept, expected = set[int](), 1.0
    for node in descending(paths):  # a child is no more probable than its parent, and comes behind it
        if (gain := math.exp(paths[node])) <= cost * expected / (1 + cost * len(kept)):
            break
        kept.add(node)
        expected += gain
    ranked = sorted(kept)
    numbers = {node: number for number, node in enumerate([ROOT, *ranked], start=ROOT)}
    return [tokens[node] for node in ranked], [numbers[parents[node]] for node in ranked]


NAME = "DRAFTREE"
"""What ``--speculative-algorithm`` calls it."""
_NODES, _REQUESTS = 16, 48
"""Nodes of a tree, the root included, and most requests at once, where the command line names none."""
_PADDING = 0
"""Token of nodes that fill a tree up: children of the root, as SGLang's own are."""

Ints = NDArray[np.int64]


def laid_out(root: int, tokens: Sequence[int], parents: Sequence[int], size: int) -> tuple[Ints, Ints]:
    """A tree as SGLang verifies it.

    Args:
        root: the last token of the text, which is node 0 there.
        tokens, parents: of ``Proposer.propose``, at most ``size`` - 1 nodes.

    Returns:
        [size] token ids; [size, size] 1 where the column's node is the row's node or one of its ancestors, else 0.
    """
    filled = [root, *tokens, *[_PADDING] * (size - 1 - len(tokens))]
    mask = np.eye(size, dtype=np.int64)
    mask[:, 0] = 1
    for node, parent in enumerate(parents, start=1):
        mask[node] |= mask[parent + 1]
    return np.array(filled, dtype=np.int64), mask


class FixedTrees:
    """Drafts trees of one size for the requests of a batch."""

    def __init__(self) -> None:
        self._proposers: dict[str, Proposer] = {}

    def draft(self, texts: Mapping[str, Sequence[int]], size: int) -> tuple[Ints, Ints]:
        """Draft for a batch; what is known of requests that are not in it is forgotten.

        Args:
            texts: of each request, by its id: the prompt and all that has been generated.
            size: nodes of a tree, the root included.

        Returns:
            as ``laid_out``, of all requests behind one another: [B * size], [B * size * size].
        """
        self._proposers = {rid: self._proposers.get(rid) or Proposer() for rid in texts}
        trees = [laid_out(ids[-1], *self._proposers[rid].propose(ids, size - 1), size) for rid, ids in texts.items()]
        tokens, masks = zip(*trees, strict=True)
        return np.concatenate(tokens), np.concatenate([mask.reshape(-1) for mask in masks])


def texts_of(batch: Any, size: int, *, behind: bool) -> dict[str, list[int]]:
    """The text of each request of SGLang's batch, by its id.

    Args:
        size: nodes of a tree.
        behind: requests have not been given yet what the last pass accepted (SGLang's overlap scheduling).
    """
    texts = {req.rid: [*req.origin_input_ids_unpadded, *req.output_ids] for req in batch.reqs}
    if behind:
        accepted, counts = batch.spec_info.accept_tokens.tolist(), batch.spec_info.accept_lens.tolist()
        for row, ids in enumerate(texts.values()):
            ids += accepted[row * size : row * size + counts[row]]
    return texts


def worker(server_args: Any) -> type:
    """SGLang's worker class with our drafts."""
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    class DraftreeWorker(NGRAMWorker):  # type: ignore[misc]
        """Verifies as NGRAM does."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.trees = FixedTrees()
            super().__init__(*args, **kwargs)

        def _prepare_draft_tokens(self, batch: Any) -> tuple[Ints, Ints]:
            behind = self.enable_overlap and not batch.grammar_needs_sync()
            return self.trees.draft(texts_of(batch, self.draft_token_num, behind=behind), self.draft_token_num)

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Nothing: texts are read when they are drafted for."""

        def add_external_corpus(self, corpus_id: str, token_chunks: Sequence[Sequence[int]]) -> int:
            raise ConfigError(f"corpus {corpus_id!r} is not drafted from: {NAME} knows each request's own text alone")

    return DraftreeWorker


def settle(server_args: Any) -> None:
    """Set what the NGRAM path needs and the command line has left open."""
    if server_args.max_running_requests is None:
        server_args.max_running_requests = _REQUESTS
    if server_args.speculative_num_draft_tokens is None:
        server_args.speculative_num_draft_tokens = _NODES
    server_args.enable_mixed_chunk = False
    server_args.speculative_eagle_topk = server_args.speculative_num_draft_tokens - 1  # any node may have all children
    if server_args.speculative_num_steps is None:
        server_args.speculative_num_steps = server_args.speculative_num_draft_tokens - 1


def check(server_args: Any) -> None:
    """Check that trees can be verified.

    Raises:
        ConfigError: they cannot.
    """
    nodes = server_args.speculative_num_draft_tokens
    if nodes is not None and nodes < 2:
        raise ConfigError(f"--speculative-num-draft-tokens is {nodes}: use at least 2, the root included")
    page, backend = server_args.page_size, server_args.attention_backend
    if (page or 1) > 1 and backend != "flashinfer":
        raise ConfigError(
            f"trees in pages of {page} need --attention-backend flashinfer, not {backend}: name it, or --page-size 1"
        )


def register() -> None:
    """Register the algorithm; SGLang calls this when it starts."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class DraftreeAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
        """Whatever asks whether it is NGRAM takes that path."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            settle(server_args)

    options = {"supports_overlap": True, "validate_server_args": check, "spec_class": DraftreeAlgorithm}
    SpeculativeAlgorithm.register(NAME, **options)(worker)
