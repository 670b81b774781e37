"""Recurrent states (``native/states.h``): rows and trees of a hybrid model have the bits of their texts alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from draftree import Engine, SamplingParams, SpeculationParams
from draftree.beams.beam_engine import BeamEngine, load_beam_source
from draftree.beams.forest import BeamParams
from draftree.engine.scheduler import SchedulerParams
from draftree.errors import CacheError, ModelFileError, UnsupportedModelError
from draftree.models.base import Nodes, prefill
from draftree.models.gguf.gguf_checks import check
from draftree.models.native.architecture import describe
from draftree.models.native.binding import LoadedModel, tiers
from draftree.models.native.native_model import NativeModel, unloaded
from tests.models.native.conftest import Dense, quantized
from tests.models.native.test_architecture import _changed
from tests.models.native.test_passes import extend, path_of, text

SHAPES: Mapping[str, Callable[[int], list[int]]] = {
    "a chain": lambda n: list(range(-1, n - 1)),
    "siblings": lambda n: [-1] * n,
    "a chain with a leaf at each node": lambda n: [i - 1 if i % 2 else max(-1, i - 2) for i in range(n)],
    "pairs": lambda n: [(i - 1) // 2 if i else -1 for i in range(n)],
    "two chains": lambda n: [max(-1, i - 2) for i in range(n)],
    "a chain, then children of any": lambda n: [i - 1 if i < n // 2 else i * 7919 % n // 2 - 1 for i in range(n)],
}


@pytest.fixture(scope="module")
def path(dense: Mapping[str, Dense], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(dense["qwen35"].path, Kind.Q8_0, tmp_path_factory.mktemp("model") / "model.gguf")


def load(path: Path, tier: str, threads: int) -> LoadedModel:
    """With a longer context."""
    found = describe(check(path))
    return LoadedModel(replace(found, hyperparameters=replace(found.hyperparameters, context=2048)), threads, tier)


class Texts:
    """Bits of the logits behind texts, each read by itself by one thread."""

    def __init__(self, path: Path) -> None:
        self._model = load(path, tiers()[-1], 1)
        self._known: dict[tuple[int, ...], bytes] = {}

    def bits(self, text: Sequence[int]) -> bytes:
        if (key := tuple(text)) not in self._known:
            row = self._model.open()
            for i, logits in enumerate(extend(self._model, row, list(text))):
                self._known[key[: i + 1]] = logits.tobytes()
            self._model.close(row)
        return self._known[key]


@pytest.fixture(scope="module")
def texts(path: Path) -> Texts:
    return Texts(path)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tier", tiers())
def test_trees_of_any_shape_have_the_bits_of_their_paths(tier: str, shape: str, path: Path, texts: Texts) -> None:
    """Below a prompt that was read in place, and with a second tree below a node of the first."""
    model, prompt, count = load(path, tier, 2), text(100), 30 if tier == "base" else 200
    row = model.open()
    extend(model, row, prompt)
    model.commit(row, range(100))
    tokens, parents = text(count, seed=2), SHAPES[shape](count)
    found = extend(model, row, tokens, parents)
    below = random.Random(1).randrange(count)
    more = text(20, seed=3)
    found = np.concatenate([found, extend(model, row, more, [below, *range(count, count + 19)])])
    tokens, parents = tokens + more, [*parents, below, *range(count, count + 19)]
    for node in (0, count // 3, count - 1, count + 19):
        branch = [tokens[each] for each in path_of(node, parents)]
        assert found[node].tobytes() == texts.bits(prompt + branch)


def test_a_row_that_takes_no_part_in_a_pass_keeps_what_it_has(path: Path, texts: Texts) -> None:
    """Of nodes whose records are lost as many were copied as there were nodes, out of memory that held fewer."""
    model, tokens = load(path, tiers()[-1], 2), text(1000, seed=4)
    row, other = model.open(), model.open()
    extend(model, row, tokens)
    model.prune(row, range(500), 0)
    model.extend([row, other], [0, 1], tokens[:1], [-1], [True])
    assert model.logits(0).tobytes() == texts.bits(tokens[:1])
    last = text(1, seed=5)
    (found,) = extend(model, row, last, [499])
    assert found.tobytes() == texts.bits(tokens[:500] + last)


@dataclass
class Live:
    """A row: what is committed, and its nodes."""

    text: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def path(self, node: int) -> list[int]:
        return path_of(node, self.parents)

    def add(self, drawn: random.Random) -> tuple[list[int], list[int]]:
        count, before = drawn.choice([0, 1, 1, 2, 5, 20, 70, 140, 200]), len(self.tokens)
        shape = SHAPES[drawn.choice(list(SHAPES))](count)
        below = drawn.choice([before - 1, before - 1, drawn.randrange(-1, before)]) if before else -1
        parents = [below if parent < 0 else before + parent for parent in shape]
        tokens = [drawn.randrange(4) for _ in range(count)]
        self.tokens += tokens
        self.parents += parents
        return tokens, parents

    def commit(self, path: list[int]) -> None:
        self.text += [self.tokens[node] for node in path]
        self.tokens, self.parents = [], []

    def prune(self, path: list[int], drawn: random.Random) -> list[int]:
        """Commit a path, and keep some nodes below it, which are returned with it."""
        root, kept = path[-1] if path else -1, list[int]()
        for node, parent in enumerate(self.parents):
            if node not in path and (parent == root or parent in kept) and drawn.random() < 0.9:
                kept.append(node)
        numbers = {node: i for i, node in enumerate(kept)} | {root: -1}
        parents, tokens = [numbers[self.parents[node]] for node in kept], [self.tokens[node] for node in kept]
        self.commit(path)
        self.tokens, self.parents = tokens, parents
        return path + kept


def extend_some(model: LoadedModel, rows: dict[int, Live], drawn: random.Random, texts: Texts) -> None:
    """One pass over some rows; a third of the nodes are compared."""
    chosen = [row for row in drawn.sample(list(rows), drawn.randint(1, len(rows))) if len(rows[row].tokens) < 200]
    new = [rows[row].add(drawn) for row in chosen]
    counts = [len(tokens) for tokens, _ in new]
    tokens, parents = ([each for pair in new for each in pair[part]] for part in range(2))
    wanted = [drawn.random() < 0.3 for _ in tokens]
    model.extend(chosen, counts, tokens, parents, wanted)
    nodes = [
        (rows[row], len(rows[row].tokens) - n + i) for row, n in zip(chosen, counts, strict=True) for i in range(n)
    ]
    scored = [node for node, want in zip(nodes, wanted, strict=True) if want]
    for slot, (live, node) in enumerate(scored):
        found = model.logits(slot).tobytes()
        assert found == texts.bits(live.text + [live.tokens[each] for each in live.path(node)])


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_grow_branch_fork_and_go_back_have_the_bits_of_their_texts(
    seed: int, path: Path, texts: Texts
) -> None:
    """Commits of parts of chains that were read in place, forks at places without a state, prunes, in batches."""
    drawn = random.Random(seed)
    model = load(path, tiers()[-1 - seed % (len(tiers()) - 1)], 1 + seed % 3)
    rows = {model.open(): Live()}
    for _ in range(25):
        row = drawn.choice(list(rows))
        live, move = rows[row], drawn.randrange(6)
        if move < 3:
            extend_some(model, rows, drawn, texts)
        elif move == 3 and live.tokens and len(live.text) < 300:
            nodes = live.path(drawn.choice([len(live.tokens) - 1, drawn.randrange(len(live.tokens))]))
            model.commit(row, nodes)
            live.commit(nodes)
        elif move == 4 and live.tokens:
            nodes = live.path(drawn.randrange(len(live.tokens)))
            nodes = nodes[: drawn.randint(0, len(nodes))]
            if (kept := live.prune(nodes, drawn)) == sorted(kept):
                model.prune(row, kept, len(nodes))
            else:  # the path is not first among them
                model.commit(row, nodes)
                live.tokens, live.parents = [], []
        elif move == 5 and len(rows) < 4:
            length = drawn.randint(0, len(live.text))
            rows[model.fork(row, length)] = Live(live.text[:length])
    for row in rows:
        model.close(row)
    assert model.cache_bytes() == 0


def test_a_chat_takes_no_more_memory_than_is_told(path: Path) -> None:
    """Ten turns: texts of several lengths are read, and then tokens decoded; a row is forked at the end of each."""
    model, description, length = load(path, "", 2), describe(check(path)), 0
    row = model.open()
    pages = model.token_bytes * 64 + 64
    for turn in range(10):
        count = (5, 70, 200)[turn % 3]
        model.extend([row], [count], text(count), range(-1, count - 1), [0] * count)
        assert model.cache_bytes() <= (length + count + 64) / 64 * pages + pages + description.row_bytes
        model.commit(row, range(count))
        length += count
        for _ in range(3):
            extend(model, row, [1])
            model.commit(row, [0])
        length += 3
        model.close(model.fork(row, length))
        assert model.cache_bytes() <= (length + 64) / 64 * pages + pages + description.row_bytes
    assert model.cache_bytes() > 3 * description.state_bytes


def test_a_prompt_that_is_read_in_pieces_takes_as_much_memory_as_is_told(path: Path) -> None:
    """Records of the end of one piece and of the next were counted as 84 and took 164: more requests were let in than
    found room, and one ended in the middle of its prompt."""
    model, description, length, taken = load(path, "", 2), describe(check(path)), 0, list[int]()
    row = model.open()
    for count in (100, 100, 70, 65, 200):
        model.extend([row], [count], text(count), range(-1, count - 1), [0] * count)
        length += count
        taken.append(model.cache_bytes() - -(-length // 64) * model.page_bytes)
        model.commit(row, range(count))
    assert max(taken) == description.row_bytes


def test_a_fork_before_the_end_of_a_prompt_reads_little_again(path: Path) -> None:
    """It goes on 64 tokens before the end of what was read: a state is kept there."""
    model, prompt = load(path, "", 2), text(250)
    row = model.open()
    extend(model, row, prompt)
    model.commit(row, range(250))
    extend(model, row, [1])
    model.commit(row, [0])
    state = describe(check(path)).state_bytes
    before = model.cache_bytes()
    fork = model.fork(row, 200)
    assert model.cache_bytes() == before
    extend(model, fork, [2])
    assert model.cache_bytes() - before >= state


@pytest.fixture(scope="module")
def model(path: Path) -> NativeModel:
    return NativeModel(path, threads=2)


PROMPTS = ["the cat in the hat sat on the mat, the cat in the hat " * 3, "one two one two one two", "a"]


@pytest.mark.parametrize("name", ["qwen35", "qwen3moe"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_any_kind_give_the_text_of_ar_decoding(
    temperature: float, name: str, dense: Mapping[str, Dense], tmp_path: Path
) -> None:
    """Experts too: in batches, in chunks of prompts, with prefixes that are used again, with a grammar and by beams."""
    model = NativeModel(quantized(dense[name].path, Kind.Q8_0, tmp_path / "model.gguf"), threads=2)
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
    alone = Engine(model, SpeculationParams(drafter="none"))
    expected = [alone.generate([prompt], params)[0].token_ids for prompt in PROMPTS]
    scheduling, accepted = SchedulerParams(rows=3, chunk=70, prefixes=3), 0
    for drafter, method in (("lookup", "opt-tree"), ("self", "static"), ("lookup+self", "auto")):
        engine = Engine(model, SpeculationParams(drafter=drafter, method=method), scheduling=scheduling)
        for _ in range(2):
            for found, ids in zip(engine.generate(PROMPTS, params), expected, strict=True):
                assert found.token_ids == ids
                accepted += sum(found.stats.accepted)
        assert (
            engine.generate([PROMPTS[0][:80]], params)[0].token_ids
            == alone.generate([PROMPTS[0][:80]], params)[0].token_ids
        )
    assert accepted > 20
    held = SamplingParams(
        max_tokens=12, temperature=temperature, seed=3, constraint=alone.grammars.regex("(ab|c){3,5}d")
    )
    texts = [each.generate(PROMPTS, held)[0].text for each in (alone, engine)]
    assert texts[0] == texts[1] and set(texts[0]) <= set("abcd")
    beams, greedy = BeamParams(width=3, returned=3), replace(params, temperature=0.0)
    hypotheses = [
        [
            each.token_ids
            for each in BeamEngine(model, load_beam_source(drafter, model) if drafter else None)
            .generate(PROMPTS[:1], greedy, beams)[0]
            .hypotheses
        ]
        for drafter in (None, "self")
    ]
    assert hypotheses[0] == hypotheses[1]


def test_rows_are_counted_with_their_states(path: Path, model: NativeModel) -> None:
    can = model.capabilities
    assert can.row_bytes == unloaded(path, "m", 1).capabilities.row_bytes == describe(check(path)).row_bytes
    assert can.slot_bytes == 2 * 2 * 2 * 128  # of one layer in four
    small = NativeModel(path, threads=1)
    small.cache_bytes = can.row_bytes + 4 * small.loaded.page_bytes
    assert small.holds([192]) and not small.holds([193]) and not small.holds([64, 64])
    with pytest.raises(CacheError):
        prefill(small, [1] * 255)
        small.cache_bytes = 0
        small.extend([prefill(small, [1])], [Nodes.chain([2])])


def test_records_of_a_large_tree_stay_within_the_cache(path: Path) -> None:
    """They are refused before they are made, and the row goes on; a prompt of as many tokens makes few."""
    model = NativeModel(path, threads=1)
    row, state = prefill(model, [1] * 20), describe(check(path)).state_bytes
    model.cache_bytes = model.loaded.cache_bytes() + 200 * model.capabilities.slot_bytes + 2 * state
    with pytest.raises(CacheError):
        model.extend([row], [Nodes([2] * 200, [-1] * 200)])
    model.cache_bytes += 90 * describe(check(path)).record_bytes
    model.extend([row], [Nodes.chain([2] * 200)])
    model.commit(row, range(200))
    assert model.loaded.cache_bytes() <= model.cache_bytes


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("conv_kernel", 5, UnsupportedModelError),
        ("group_count", 3, ModelFileError),
        ("inner_size", 255, ModelFileError),
        ("inner_size", 4 * 24, UnsupportedModelError),
        ("state_size", 512, UnsupportedModelError),
        ("time_step_rank", 0, ModelFileError),
    ],
)
def test_numbers_of_delta_nets_that_do_not_fit_are_refused(
    key: str, value: int, error: type[Exception], path: Path
) -> None:
    with pytest.raises(
        error, match=f"{value // 4 if error == UnsupportedModelError and key == 'inner_size' else value}"
    ):
        describe(_changed(check(path), **{f"ssm__{key}": value}))


@pytest.mark.parametrize("key", ["group_count", "state_size", "inner_size"])
def test_sizes_that_the_tensors_have_not_are_refused(key: str, path: Path) -> None:
    header = check(path)
    stored = header.metadata.stored[f"qwen35.ssm.{key}"]
    assert isinstance(stored, int)
    with pytest.raises(ModelFileError, match="delta net"):
        LoadedModel(describe(_changed(header, **{f"ssm__{key}": stored // 2})), 1)


def test_the_layers_of_a_draft_head_are_left_to_it(path: Path) -> None:
    """Without the fourth layer no layer attends."""
    header = check(path)
    description = describe(_changed(header, nextn_predict_layers=1))
    assert (description.hyperparameters.layers, description.attending) == (3, 0)
    model, tokens = LoadedModel(description, 2), text(80)
    alone, row = model.open(), model.open()
    for token in tokens:
        expected = extend(model, alone, [token])
        model.commit(alone, [0])
    assert extend(model, row, tokens)[-1].tobytes() == expected.tobytes()
    with pytest.raises(ModelFileError, match="4"):
        describe(_changed(header, nextn_predict_layers=4))
