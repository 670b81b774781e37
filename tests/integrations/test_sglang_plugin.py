"""SGLang's plugin against its contract: the registry, the worker's methods, arrays of fixed size, and greedy text."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from draftree.errors import ConfigError
from draftree.integrations.other_engines import NAME, FixedTrees, Ints, Proposer, laid_out, register

ROOT = Path(__file__).parents[2]
SIZE = 6
Next = Callable[[Sequence[int]], int]


class _Algorithm:
    """SGLang's ``CustomSpecAlgo``, as far as a plugin sees it."""

    def __init__(self, name: str, factory: Any, *, supports_overlap: bool, validate_server_args: Any) -> None:
        self.name, self.factory, self.supports_overlap = name, factory, supports_overlap
        self.validate_server_args = validate_server_args

    def is_ngram(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        return True

    def handle_server_args(self, server_args: Any) -> None:
        """Nothing by default."""


class _Registry:
    """``SpeculativeAlgorithm`` with its classmethod ``register``."""

    made: dict[str, _Algorithm] = {}

    @classmethod
    def register(cls, name: str, *, spec_class: type[_Algorithm], **options: Any) -> Callable[[Any], Any]:
        def decorator(factory: Any) -> Any:
            cls.made[name] = spec_class(name, factory, **options)
            return factory

        return decorator


@dataclass
class _Request:
    rid: str
    origin_input_ids_unpadded: list[int]
    output_ids: list[int] = field(default_factory=list)


class _NgramWorker:
    """SGLang's NGRAM worker on a CPU: it loads a corpus, asks for trees, verifies them greedily by their masks, and
    gives requests what was accepted one pass later where scheduling overlaps."""

    def __init__(self, server_args: Any, target: Next) -> None:
        self.draft_token_num, self.enable_overlap = server_args.nodes, server_args.overlap
        self._target = target
        self.passes = 0
        for name, chunks in server_args.corpora.items():
            self.add_external_corpus(name, chunks)

    def add_external_corpus(self, corpus_id: str, token_chunks: list[list[int]]) -> int:
        raise NotImplementedError

    def _prepare_draft_tokens(self, batch: Any) -> tuple[Ints, Ints]:
        raise NotImplementedError

    def _update_ngram_corpus(self, batch: Any) -> None:
        raise NotImplementedError

    def forward(self, batch: Any) -> None:
        """One pass: what it accepts of each request is in ``batch.spec_info``, rows of the size of a tree."""
        requests, size = batch.reqs, self.draft_token_num
        rows, lengths = batch.spec_info.accept_tokens.view(-1, size).tolist(), batch.spec_info.accept_lens.tolist()
        previous = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        drafts, flat = self._prepare_draft_tokens(batch)
        assert drafts.dtype == flat.dtype == np.int64
        assert drafts.shape == (len(requests) * size,) and flat.shape == (len(requests) * size * size,)
        accepted = torch.zeros((len(requests), size), dtype=torch.int64)
        counts = torch.ones(len(requests), dtype=torch.int32)
        for row, request in enumerate(requests):
            if self.enable_overlap:
                request.output_ids += previous[row]
            tokens, mask = drafts.reshape(-1, size)[row], flat.reshape(-1, size, size)[row]
            found = _verified(tokens, mask, [*request.origin_input_ids_unpadded, *request.output_ids], self._target)
            accepted[row, : len(found)], counts[row] = torch.tensor(found), len(found)
            if not self.enable_overlap:
                request.output_ids += found
        self._update_ngram_corpus(batch)
        self.passes += 1
        batch.spec_info = SimpleNamespace(accept_tokens=accepted.flatten(), accept_lens=counts)


def _verified(tokens: Ints, mask: Ints, text: list[int], target: Next) -> list[int]:
    """What a pass accepts, and the target's own token: node 0 is the text's last token, a node sees its ancestors."""
    assert tokens[0] == text[-1] and (mask[:, 0] == 1).all() and (np.diag(mask) == 1).all()
    assert (np.triu(mask, 1) == 0).all()
    node, found = 0, [target(text)]
    while True:
        children = [n for n in range(len(tokens)) if mask[n].sum() == mask[node].sum() + 1 and mask[n, node]]
        right = [n for n in children if tokens[n] == found[-1]]
        if not right:
            return found
        node = right[0]
        assert [int(tokens[n]) for n in np.flatnonzero(mask[node])] == [text[-1], *found]
        found.append(target([*text, *found]))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> _Algorithm:
    names = ("sglang", "sglang.srt", "sglang.srt.speculative")
    parts: dict[str, dict[str, Any]] = {
        "spec_info": {"SpeculativeAlgorithm": _Registry},
        "spec_registry": {"CustomSpecAlgo": _Algorithm},
        "ngram_worker": {"NGRAMWorker": _NgramWorker},
    }
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for part, attributes in parts.items():
        made = ModuleType(f"sglang.srt.speculative.{part}")
        vars(made).update(attributes)
        monkeypatch.setitem(sys.modules, made.__name__, made)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    resolve_name(declared["sglang.srt.plugins"]["draftree"])()
    return _Registry.made[NAME]


def cycle(text: Sequence[int]) -> int:
    """A target that repeats itself, with a detour now and then."""
    return (text[-1] * 3 + 1) % 7 if len(text) % 11 else 5


def autoregressive(prompt: Sequence[int], tokens: int, target: Next = cycle) -> list[int]:
    text = list(prompt)
    for _ in range(tokens):
        text.append(target(text))
    return text[len(prompt) :]


@pytest.mark.parametrize("overlap", [True, False])
def test_greedy_text_is_the_targets_in_fewer_passes(registered: _Algorithm, overlap: bool) -> None:
    arguments = SimpleNamespace(nodes=SIZE, overlap=overlap, corpora={})
    worker = registered.factory(arguments)(arguments, cycle)
    requests = [_Request("a", [1, 2, 3]), _Request("b", [6])]
    first = torch.zeros((2, SIZE), dtype=torch.int64)
    first[:, 0] = torch.tensor([cycle(r.origin_input_ids_unpadded) for r in requests])  # the prompts' passes
    if not overlap:
        for request, token in zip(requests, first[:, 0].tolist(), strict=True):
            request.output_ids.append(token)
    spec = SimpleNamespace(accept_tokens=first.flatten(), accept_lens=torch.ones(2, dtype=torch.int32))
    batch = SimpleNamespace(reqs=requests, spec_info=spec, grammar_needs_sync=lambda: False)
    while min(len(request.output_ids) for request in requests) < 60:
        worker.forward(batch)
    for request in requests:
        assert request.output_ids == autoregressive(request.origin_input_ids_unpadded, len(request.output_ids))
    assert worker.passes < 40


def test_the_algorithm_takes_the_path_of_ngram(registered: _Algorithm) -> None:
    assert registered.is_ngram() and not registered.has_draft_kv() and registered.supports_overlap


def arguments(**given: Any) -> SimpleNamespace:
    names = ("max_running_requests", "speculative_num_draft_tokens", "speculative_num_steps", "attention_backend")
    return SimpleNamespace(**{**dict.fromkeys(names), "page_size": 1, "enable_mixed_chunk": True, **given})


def test_what_the_command_line_leaves_open_is_settled(registered: _Algorithm) -> None:
    given = arguments(max_running_requests=7)
    registered.handle_server_args(given)
    assert (given.max_running_requests, given.speculative_num_draft_tokens, given.enable_mixed_chunk) == (7, 16, False)
    assert given.speculative_eagle_topk == given.speculative_num_steps == 15


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculative_num_draft_tokens": 1}, "--speculative-num-draft-tokens is 1: .*2"),
        ({"page_size": 16, "attention_backend": "fa3"}, "16 .*--attention-backend flashinfer"),
    ],
)
def test_what_cannot_verify_trees_is_refused(registered: _Algorithm, given: dict[str, Any], message: str) -> None:
    registered.validate_server_args(arguments(page_size=16, attention_backend="flashinfer"))
    with pytest.raises(ConfigError, match=message):
        registered.validate_server_args(arguments(**given))


def test_a_corpus_of_the_host_is_refused(registered: _Algorithm) -> None:
    arguments = SimpleNamespace(nodes=4, overlap=False, corpora={"own": [[1, 2, 3], [4]]})
    with pytest.raises(ConfigError, match="corpus 'own'"):
        registered.factory(arguments)(arguments, cycle)


def test_trees_are_filled_up_with_children_of_the_root() -> None:
    tokens, mask = laid_out(9, [5, 6, 7], [-1, -1, 0], 5)
    assert tokens.tolist() == [9, 5, 6, 7, 0]
    assert mask.tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 0, 0, 1]]


def test_requests_that_left_are_forgotten() -> None:
    trees = FixedTrees()
    trees.draft({"a": [1, 2, 3], "b": [4, 5]}, 4)
    trees.draft({"b": [4, 5, 6]}, 4)
    assert list(trees._proposers) == ["b"]


@pytest.mark.filterwarnings("ignore")  # that there is no GPU
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is missing: see docs/scale.md")
def test_sglangs_own_classes_take_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels, which load on no CPU, are stand-ins; the links of a tree are those that it makes of our mask."""
    for name in ("sgl_kernel", "sgl_kernel.speculative"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    register()
    algorithm = import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm.from_string(NAME)
    assert algorithm.is_ngram() and not algorithm.has_draft_kv() and algorithm.supports_overlap
    ngram, made = import_module("sglang.srt.speculative.ngram_worker"), algorithm.factory(None)
    for name in ("_prepare_draft_tokens", "_update_ngram_corpus", "add_external_corpus"):
        theirs, ours = (signature(getattr(owner, name)).parameters for owner in (ngram.NGRAMWorker, made))
        assert [*theirs] == [*ours]
    worker, text = object.__new__(made), [1, 2, 3, 4, 1, 2, 5, 1, 2]
    worker.trees, worker.enable_overlap, worker.draft_token_num = FixedTrees(), False, SIZE
    tokens, mask = worker._prepare_draft_tokens(SimpleNamespace(reqs=[_Request("a", text[:5], text[5:])]))
    drafted, parents = Proposer().propose(text, SIZE - 1)
    assert tokens.tolist() == [text[-1], *drafted] and parents.count(-1) == 2
    children, siblings = (links[0].tolist() for links in ngram._derive_tree_links(mask, 1, SIZE))
    for node in range(SIZE):
        found, child = list[int](), children[node]
        while child >= 0:
            found.append(child)
            child = siblings[child]
        assert found == [number for number, parent in enumerate(parents, start=1) if parent + 1 == node]
