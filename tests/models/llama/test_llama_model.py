"""Passes of llama.cpp: whatever rows do, the logits are one-token decoding's, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from draftree.errors import CacheError
from draftree.models.base import LanguageModel, Nodes, Row, decoded, prefill
from draftree.models.huggingface.inspection import self_test
from draftree.models.llama import llama_model
from draftree.models.llama.library import F16, open_library
from draftree.models.llama.llama_model import LlamaModel
from draftree.models.protocols import FeatureModel
from draftree.tree import ROOT

from ... import tiny_gguf
from ...references import extended, prefilled

VOCAB = 256


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", weights="Q8_0")


@pytest.fixture
def model(path: Path) -> LlamaModel:
    return LlamaModel(path)


@pytest.fixture(scope="module")
def reference(path: Path) -> LlamaModel:
    """Decodes one token at a time, one row at a time."""
    return LlamaModel(path)


def by_one_token(reference: LlamaModel, ids: Sequence[int]) -> Tensor:
    """[V] logits after ``ids``, fed one by one."""
    row = reference.open()
    logits = torch.from_numpy(decoded(reference, row, ids)[-1])
    reference.close(row)
    return logits


@dataclass(eq=False)
class Followed:
    """A row, and what it should hold."""

    row: Row
    ids: list[int]
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def path(self, node: int) -> list[int]:
        """Tokens up to a node."""
        found = list[int]()
        while node != ROOT:
            found.append(self.tokens[node])
            node = self.parents[node]
        return self.ids + found[::-1]

    def grown(self, rng: Random, count: int) -> Nodes:
        """Nodes below any that are there."""
        first = len(self.tokens)
        for node in range(first, first + count):
            self.parents.append(rng.randrange(ROOT, node) if node else ROOT)
            self.tokens.append(rng.randrange(VOCAB))
        wanted = rng.choice([None, rng.randint(0, count)])
        return Nodes(self.tokens[first:], self.parents[first:], wanted)


def kept(each: Followed, rng: Random) -> tuple[list[int], int]:
    """A random set of nodes that is closed under parents, and a random trunk of it."""
    trunk, node = list[int](), ROOT
    while rng.random() < 0.6 and (below := [n for n, p in enumerate(each.parents) if p == node]):
        node = rng.choice(below)
        trunk.append(node)
    chosen = set(trunk)
    for n, parent in enumerate(each.parents):
        if (parent == node or (parent in chosen and parent not in trunk[:-1])) and rng.random() < 0.6:
            chosen.add(n)
    return sorted(chosen), len(trunk)


@pytest.mark.parametrize(("seed", "ids"), [(0, 256), (2, 9), (3, 12), (4, 24)])
def test_whatever_rows_do_logits_are_those_of_one_token_decoding(
    seed: int, ids: int, model: LlamaModel, reference: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of several calls, commits, prunes, forks and closes of rows, and cells that are moved; with few ids leaves
    give theirs up and are read again."""
    monkeypatch.setattr(llama_model, "_TRASH", ids - 1)
    model._free = list(range(ids - 1))
    rng, rows, checked = Random(seed), list[Followed](), 0
    for _ in range(70):
        act = rng.choice(["open", "extend", "extend", "extend", "commit", "prune", "fork", "close"])
        if act == "open" and len(rows) < 3:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
            rows.append(Followed(prefill(model, prompt), prompt))
        elif rows and act == "extend":
            chosen = rng.sample(rows, rng.randint(1, len(rows)))
            before = [len(each.tokens) for each in chosen]
            nodes = [each.grown(rng, rng.choice([1, 2, 5, 12])) for each in chosen]
            logits = extended(model, [each.row for each in chosen], nodes)
            for each, new, found, first in zip(chosen, nodes, logits, before, strict=True):
                for i in rng.sample(range(new.scored), min(2, new.scored)):
                    node = first + len(new.tokens) - new.scored + i
                    assert torch.equal(found[i], by_one_token(reference, each.path(node)))
                    checked += 1
        elif rows and act in ("commit", "prune"):
            each = rng.choice(rows)
            if act == "commit":
                keep = list[int]()
                while below := [n for n, p in enumerate(each.parents) if p == (keep[-1] if keep else ROOT)]:
                    keep.append(rng.choice(below))
                keep = keep[: rng.randint(0, 5)]
                trunk = len(keep)
                model.commit(each.row, keep)
            else:
                keep, trunk = kept(each, rng)
                model.prune(each.row, keep, trunk)
            numbers = {ROOT: ROOT} | {old: max(new - trunk, ROOT) for new, old in enumerate(keep)}
            each.ids += [each.tokens[n] for n in keep[:trunk]]
            each.tokens, each.parents = (
                [each.tokens[n] for n in keep[trunk:]],
                [numbers[each.parents[n]] if each.parents[n] not in keep[:trunk] else ROOT for n in keep[trunk:]],
            )
            assert each.row.length == len(each.ids)
            assert each.row.parents == each.parents
        elif rows and act == "fork" and len(rows) < 4:
            each = rng.choice(rows)
            length = rng.randint(0, each.row.length)
            rows.append(Followed(model.fork(each.row, length), each.ids[:length]))
        elif rows and act == "close":
            each = rows.pop(rng.randrange(len(rows)))
            model.close(each.row)
    assert checked > 15
    for each in rows:
        model.close(each.row)
    assert sorted(model._free) == list(range(ids - 1))


def test_cells_that_were_rejected_are_used_again(model: LlamaModel, reference: LlamaModel) -> None:
    """Of 3,000 nodes nearly all are rejected: the context has to be cleared up, and stays as it is."""
    row, ids = prefill(model, [1, 2, 3]), [1, 2, 3]
    for step in range(100):
        tokens = [(7 * step + i) % VOCAB for i in range(30)]
        logits = extended(model, [row], [Nodes(tokens, [ROOT, *range(14), ROOT, *range(15, 29)])])
        model.commit(row, [15])
        ids.append(tokens[15])
    assert torch.equal(logits[0, 15], by_one_token(reference, ids))
    assert model._context.cells == llama_model.FIRST_CELLS


def test_a_context_grows_with_its_rows(path: Path, reference: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_model, "FIRST_CELLS", 256)
    model = LlamaModel(path)
    texts = [[(3 * i + b) % VOCAB for i in range(200)] for b in range(3)]
    found = [prefilled(model, text)[1] for text in texts]
    assert model._context.cells >= 600
    for logits, text in zip(found, texts, strict=True):
        assert torch.equal(logits, by_one_token(reference, text))


def test_a_cache_that_may_not_be_so_large_refuses_and_loses_nothing(model: LlamaModel, reference: LlamaModel) -> None:
    model.cache_bytes = 1024 * model.capabilities.slot_bytes
    row = prefill(model, [5] * 1000)
    assert not model.holds([1000, 1000])
    for _ in range(2):
        with pytest.raises(CacheError, match="bytes"):
            prefill(model, [7] * 1000)
    assert model.rows == 1
    logits = extended(model, [row], [Nodes.chain([9])])
    assert torch.equal(logits[0, 0], by_one_token(reference, [5] * 1000 + [9]))


@pytest.mark.parametrize("length", [100, 600])
def test_chunks_of_any_size_read_what_a_whole_text_reads(length: int, model: LlamaModel, reference: LlamaModel) -> None:
    """Past 512 cells too, where llama.cpp would split the sums of attention over threads, and in passes of 64 and more,
    where it would take tiles: keys and values of different types keep it from both."""
    text = [(5 * i * i + 3 * i) % VOCAB for i in range(length)]
    expected = by_one_token(reference, text)
    for chunk in (7, 64, 200):
        row = model.open()
        for at in range(0, length, chunk):
            part = text[at : at + chunk]
            logits = extended(model, [row], [Nodes.chain(part, wanted=1)])
            model.commit(row, range(len(part)))
        assert torch.equal(logits[0, 0], expected)
        model.close(row)


def test_it_has_several_live_paths_and_no_hidden_states(model: LlamaModel) -> None:
    assert isinstance(model, LanguageModel) and not isinstance(model, FeatureModel)


def test_it_passes_the_self_test(model: LlamaModel) -> None:
    self_test(model)
    assert model.rows == 0


def test_more_leaves_than_there_are_ids(model: LlamaModel, reference: LlamaModel) -> None:
    """llama.cpp has 256 ids, one a leaf: a fan of 400 is read in pieces, and any of its leaves can be kept."""
    rows = [prefill(model, [b]) for b in (1, 2)]
    fan = Nodes([leaf % VOCAB for leaf in range(400)], [ROOT] * 400)
    logits = extended(model, rows, [fan, fan])
    for leaf in (0, 255, 399):
        assert torch.equal(logits[1, leaf], by_one_token(reference, [2, leaf % VOCAB]))
    below = extended(model, rows, [Nodes([9], [3]), Nodes([9], [399])])
    assert torch.equal(below[0, 0], by_one_token(reference, [1, 3, 9]))
    assert torch.equal(below[1, 0], by_one_token(reference, [2, 399 % VOCAB, 9]))
    model.commit(rows[0], [77])
    logits = extended(model, rows[:1], [Nodes.chain([4])])
    assert torch.equal(logits[0, 0], by_one_token(reference, [1, 77, 4]))


def test_nodes_that_cannot_be_added_change_nothing(model: LlamaModel, reference: LlamaModel) -> None:
    row = prefill(model, [1, 2])
    model.extend([row], [Nodes([3, 4], [ROOT, ROOT])])
    for parents in ([2], [-2], [5]):
        with pytest.raises(CacheError, match="parent"):
            model.extend([row], [Nodes([6], parents)])
    long = model.capabilities.max_length
    with pytest.raises(CacheError, match="beyond"):
        model.extend([row], [Nodes([0] * long, [*range(1, long + 1)])])
    with pytest.raises(CacheError):
        model.commit(row, [0, 1])
    logits = extended(model, [row], [Nodes([5], [1])])
    assert torch.equal(logits[0, 0], by_one_token(reference, [1, 2, 4, 5]))
    model.close(row)
    with pytest.raises(CacheError, match="closed"):
        model.extend([row], [Nodes.chain([1])])


def test_a_context_is_not_made_for_all_tokens_that_may_come(model: LlamaModel) -> None:
    model.reserve(8, model.capabilities.max_length)
    assert model._context.cells == llama_model.FIRST_CELLS
    row = prefill(model, [5] * 1500)
    assert 1500 <= model._context.cells <= 3072
    model.close(row)


def test_the_structs_are_those_of_the_pinned_library() -> None:
    """Defaults that are spread over the struct: with another layout one of them is another number."""
    found = open_library().context_default_params()
    assert (found.n_ctx, found.n_batch, found.n_ubatch, found.n_seq_max) == (512, 2048, 512, 1)
    assert (found.flash_attn_type, found.type_k, found.type_v, found.kv_unified) == (-1, F16, F16, False)
    assert ([*found._positions], found._defragmenting) == ([0, 0, -1, -1, -1, -1], -1)
    assert [*found._flags, found.swa_full] == [False, True, True, True, True]
    assert not open_library().model_default_params().vocab_only
