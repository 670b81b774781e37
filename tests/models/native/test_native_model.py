"""The native engine as a ``LanguageModel``: scores are those of NumPy over the same logits, rows are its own."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from draftree import Engine, SamplingParams, SchedulerParams, SpeculationParams
from draftree.errors import CacheError, CacheFullError, ConfigError, ModelFileError, UnsupportedModelError
from draftree.models.base import FINAL, FINAL_STATE, FeatureSpec, Nodes, prefill, prefill_scored
from draftree.models.cost_profile import Identity
from draftree.models.gguf.gguf_checks import check
from draftree.models.native.binding import EMBEDDING, OUTPUT, VERSION, tiers
from draftree.models.native.header_reader import FORMATS
from draftree.models.native.native_model import NativeModel, NativeScores
from draftree.models.prefixes import WORTHWHILE, PrefixCache
from draftree.sampling.warping import Warping, stream_key
from draftree.scores import Changes, Draft, Edit, NumpyScores, Scores, Top
from tests import tiny_gguf
from tests.models.native.conftest import Dense

TEXT = [5, 200, 31, 7, 90, 4, 4, 150]
NODES = Nodes([9, 8, 7, 6, 5], [-1, 0, 0, 1, -1])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("model") / "model.gguf", weights="Q4_1", context=256)


@pytest.fixture(scope="module")
def model(path: Path) -> NativeModel:
    return NativeModel(path)


def scored(model: NativeModel) -> tuple[Scores, Scores]:
    """Scores after five nodes, and those of NumPy over the same logits."""
    found = model.extend([prefill(model, TEXT)], [NODES])
    return found, NumpyScores(found.logits(range(5)), [5])


def random_edits(vocab: int, seed: int) -> list[Edit]:
    """Of five nodes: none, a mask, changes, both, a mask that allows nothing."""
    random = np.random.default_rng(seed)
    mask = random.integers(0, 2**32, (vocab + 31) // 32, dtype=np.uint32)
    mask[-1] &= np.uint32((1 << (vocab % 32 or 32)) - 1)
    tokens = random.permutation(vocab)[:20].astype(np.int32)
    positive, negative, addend = (random.random((3, 20)) + 0.5).astype(np.float32)
    changes = Changes(tokens, positive, negative, addend)
    return [Edit(), Edit(None, mask), Edit(changes), Edit(changes, mask), Edit(None, np.zeros_like(mask))]


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_scores_are_those_of_numpy_over_the_same_logits(seed: int | None, model: NativeModel) -> None:
    found, expected = scored(model)
    vocab = model.capabilities.vocab_size
    edits = None if seed is None else random_edits(vocab, seed)
    slots = [4, 0, 2, 1, 3] if edits is None else range(5)
    np.testing.assert_array_equal(found.argmax(slots, edits), expected.argmax(slots, edits))
    np.testing.assert_array_equal(found.logits(slots, edits), expected.logits(slots, edits))
    for count in (1, 7, vocab, vocab + 5):
        same_top(found.top(slots, count, edits), expected.top(slots, count, edits))
    if edits is None:
        tokens = [1, 100, 7, 0, vocab - 1]
        np.testing.assert_allclose(
            found.log_probabilities(slots, tokens), expected.log_probabilities(slots, tokens), atol=2e-5
        )


WARPINGS = [
    Warping(0.0),
    Warping(1.0),
    Warping(0.6),
    Warping(3.0),
    Warping(1.0, top_k=5),
    Warping(1.0, top_k=1),
    Warping(1.5, top_p=0.9),
    Warping(3.0, top_p=0.5),
    Warping(1.0, min_p=0.05),
    Warping(2.0, top_k=40, top_p=0.95, min_p=0.02),
]


@pytest.mark.parametrize("warping", WARPINGS, ids=str)
def test_draws_are_those_of_numpy(warping: Warping, model: NativeModel) -> None:
    found, expected = scored(model)
    edits = random_edits(model.capabilities.vocab_size, 3)
    for position in range(60):
        keys = [stream_key(slot, position) for slot in range(5)]
        for given in (None, edits):
            ours = found.draw(range(5), keys, [warping] * 5, given)
            np.testing.assert_array_equal(ours, expected.draw(range(5), keys, [warping] * 5, given))


def same_top(ours: Top, theirs: Top) -> None:
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-5)
    np.testing.assert_allclose(ours.entropies, theirs.entropies, atol=2e-5)


@pytest.mark.parametrize("warping", WARPINGS, ids=str)
def test_drafts_are_ranked_as_by_numpy(warping: Warping, model: NativeModel) -> None:
    """By warped logits, with the noise of the target's draw or without; at temperature 0 by the logits alone."""
    found, expected = scored(model)
    vocab = model.capabilities.vocab_size
    warpings = [warping, Warping(0.0), warping, Warping(0.8), warping]
    for position in range(20):
        keys = [stream_key(slot, position) for slot in range(5)]
        for edits in (None, random_edits(vocab, position)):
            for draft in (Draft(warpings), Draft(warpings, keys)):
                for count in (1, 6, vocab):
                    same_top(found.top(range(5), count, edits, draft), expected.top(range(5), count, edits, draft))


@pytest.mark.parametrize("warping", WARPINGS, ids=str)
def test_no_child_is_more_probable_than_its_parent(warping: Warping, model: NativeModel) -> None:
    """Where a mask leaves a token alone it had a log-probability above 0, by rounding: trees lost its parent."""
    vocab, random = model.capabilities.vocab_size, np.random.default_rng(0)
    for scores in scored(model):
        for position in range(50):
            bits = np.zeros((5, -(-vocab // 32) * 32), np.bool_)
            for row, left in zip(bits, (1, 1, 2, 3, vocab), strict=True):
                row[random.permutation(vocab)[:left]] = True
            edits = [Edit(None, np.packbits(row, bitorder="little").view(np.uint32)) for row in bits]
            keys = [stream_key(slot, position) for slot in range(5)]
            for draft in (None, Draft([warping] * 5), Draft([warping] * 5, keys)):
                assert (scores.top(range(5), 3, edits, draft).logprobs <= 0).all()


def test_drafts_of_a_large_vocabulary_are_ranked_as_by_numpy(tmp_path: Path) -> None:
    """More tokens than C sorts at once, some with noise that one in ten thousand has; all tiers give the same bits."""
    vocabulary = tiny_gguf.byte_level(extra=[f"<{i}>" for i in range(10_000)])
    path = tiny_gguf.write(tmp_path / "large.gguf", layers=1, vocabulary=vocabulary, context=64)
    models = [NativeModel(path, tier=tier) for tier in tiers()]
    expected = scored(models[0])[1]
    for position in range(40):
        draft = Draft([Warping(1.0)] * 5, [stream_key(slot, position) for slot in range(5)])
        first, *others = [scored(model)[0].top(range(5), 8, None, draft) for model in models]
        same_top(first, expected.top(range(5), 8, None, draft))
        for other in others:
            assert all(map(np.array_equal, first, other))


def test_scores_of_an_earlier_pass_are_an_error(model: NativeModel) -> None:
    row, scores = prefill_scored(model, TEXT)
    assert isinstance(scores, NativeScores)
    model.extend([row], [Nodes.chain([1])])
    with pytest.raises(CacheError):
        scores.argmax([0])
    with pytest.raises(CacheError):
        scores.logits([0])


def test_slots_of_several_rows_follow_one_another(model: NativeModel) -> None:
    rows = [prefill(model, TEXT[:n]) for n in (3, 8)]
    scores = model.extend(rows, [Nodes.chain([1, 2, 3], wanted=1), Nodes([4, 5], [-1, -1])])
    assert scores.starts == [0, 1, 3]
    found = scores.logits([0, 1, 2])
    for logits, branch in zip(found, ([*TEXT[:3], 1, 2, 3], [*TEXT, 4], [*TEXT, 5]), strict=True):
        np.testing.assert_array_equal(logits, prefill_scored(model, branch)[1].logits([0])[0])


def test_rows_know_their_lengths_and_nodes(model: NativeModel) -> None:
    row = prefill(model, TEXT)
    assert (row.length, len(row.parents)) == (8, 0)
    model.extend([row], [NODES])
    model.extend([row], [Nodes([1], [3])])
    assert row.parents == [-1, 0, 0, 1, -1, 3]
    model.prune(row, [0, 1, 2, 3], 1)
    assert (row.length, row.parents) == (9, [-1, -1, 0])
    model.commit(row, [0, 2])
    assert (row.length, len(row.parents)) == (11, 0)
    fork = model.fork(row, 9)
    assert (fork.length, row.length) == (9, 11)
    found = model.extend([fork], [Nodes.chain([3])]).logits([0])
    np.testing.assert_array_equal(found, prefill_scored(model, [*TEXT, 9, 3])[1].logits([0]))


def test_rows_of_others_are_refused(model: NativeModel, path: Path) -> None:
    other = prefill(NativeModel(path), TEXT)
    closed = prefill(model, TEXT)
    model.close(closed)
    for row in (other, closed):
        for call in (lambda r: model.extend([r], [NODES]), lambda r: model.commit(r, []), model.fork, model.close):
            with pytest.raises(CacheError):
                call(row)


def test_the_cache_keeps_to_its_memory(path: Path) -> None:
    model = NativeModel(path)
    row = prefill(model, TEXT)
    assert model.loaded.cache_bytes() == model.loaded.page_bytes
    model.cache_bytes = 4 * model.loaded.page_bytes
    assert model.holds([64, 64]) and not model.holds([64, 65]) and not model.holds([1, 1, 1])
    with pytest.raises(CacheFullError):
        model.extend([row], [Nodes.chain([1] * 249)])
    assert row.length == 8 and not len(row.parents)
    model.extend([row], [Nodes.chain([1] * 248)])


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_the_cache_holds_find_room_to_their_end(seed: int, path: Path) -> None:
    """Tokens were counted, and pages taken: rows that were let in together failed together."""
    random, model = Random(seed), NativeModel(path)
    lengths = [random.choice((1, 63, 64, 65, 128, 129, 200)) for _ in range(4)]
    model.cache_bytes = sum((length + 63) // 64 + 1 for length in lengths) * model.loaded.page_bytes
    assert model.holds(lengths)
    model.cache_bytes -= 1
    assert not model.holds(lengths)
    model.cache_bytes += 1
    rows = [model.open() for _ in lengths]
    while growing := [at for at, row in enumerate(rows) if row.length < lengths[at]]:
        at = random.choice(growing)
        count = random.randint(1, lengths[at] - rows[at].length)
        model.extend([rows[at]], [Nodes.chain([3] * count)])
        model.commit(rows[at], range(random.randint(1, count)))
    assert model.loaded.cache_bytes() <= model.cache_bytes


@pytest.mark.parametrize("prefixes", [0, 8])
@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_requests_that_are_let_in_together_end_well(drafter: str, prefixes: int, path: Path) -> None:
    """Four prompts of 60 tokens with 8 more each were let into a cache of 400 tokens, whose pages are of 64: at the
    65th token all four ended with an error."""
    model, speculation = NativeModel(path), SpeculationParams(drafter=drafter, method="chain", nodes=3)
    model.cache_bytes = 400 * model.capabilities.slot_bytes
    engine = Engine(model, speculation, scheduling=SchedulerParams(rows=4, prefixes=prefixes))
    for begin in range(0, 40, 4):
        prompts = [[begin + row, *(i % 7 for i in range(59))] for row in range(4)]
        found = engine.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
        assert [len(each.token_ids) for each in found] == [8] * 4


def test_kept_rows_take_the_memory_of_the_cache(path: Path) -> None:
    """Short ones were counted by their tokens: each takes a page, and has room for one more."""
    model = NativeModel(path)
    model.cache_bytes = 16 * model.loaded.page_bytes
    prefixes = PrefixCache(model, 64)
    for first in range(20):
        text = [first, *range(1, WORTHWHILE)]
        prefixes.keep(text, prefill(model, text))
    assert prefixes.lengths == [WORTHWHILE] * 8
    assert model.loaded.cache_bytes() <= model.cache_bytes


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted where Linux lists them")
def test_two_models_share_the_threads_of_one(path: Path) -> None:
    """Those of the other end, and the shared ones with the last model; models with other threads keep their own."""
    before = threads_of_this_process()
    one, two, alone = (NativeModel(path, threads=threads) for threads in (3, 3, 2))
    assert threads_of_this_process() == before + 2 + 2 + 1
    two.share_threads(one)
    alone.share_threads(one)
    assert threads_of_this_process() == before + 2 + 1
    expected = prefill_scored(one, TEXT)[1].logits([0])
    del one
    assert np.array_equal(prefill_scored(two, TEXT)[1].logits([0]), expected)
    assert np.array_equal(prefill_scored(alone, TEXT)[1].logits([0]), expected)
    del two, alone
    assert threads_of_this_process() == before


def test_models_on_shared_threads_take_turns(path: Path) -> None:
    """Each gets what it computes alone, while another thread calls the other one."""
    models = [NativeModel(path, threads=2) for _ in range(2)]
    models[1].share_threads(models[0])
    expected = prefill_scored(models[0], TEXT)[1].logits([0])

    def repeat(model: NativeModel) -> bool:
        return all(np.array_equal(prefill_scored(model, TEXT)[1].logits([0]), expected) for _ in range(100))

    with ThreadPoolExecutor() as pool:
        assert all(pool.map(repeat, models))


def test_a_twin_has_rows_of_its_own(path: Path) -> None:
    """On the same weights, cache and threads; a pass of one ends the scores of both."""
    model = NativeModel(path)
    twin, row = model.twin(), prefill(model, TEXT)
    other, scores = prefill_scored(twin, TEXT[:3])
    assert (model.rows, twin.rows) == (1, 1)
    with pytest.raises(CacheError, match="closed"):
        twin.extend([row], [Nodes.chain([1])])
    expected = prefill_scored(NativeModel(path), [*TEXT, 1])[1].logits([0])
    assert np.array_equal(model.extend([row], [Nodes.chain([1])]).logits([0]), expected)
    with pytest.raises(CacheError, match="earlier pass"):
        scores.argmax([0])
    twin.track_features()
    assert model.tracked == twin.tracked == FINAL_STATE
    twin.close(other)
    assert (model.rows, twin.rows) == (1, 0)


def test_hidden_states_follow_rows(path: Path) -> None:
    model = NativeModel(path)
    before = model.open()
    model.track_features(FeatureSpec((1, FINAL)))
    row = prefill(model, TEXT)
    model.extend([row], [NODES])
    model.commit(row, [0, 2])
    whole = model.states(prefill(model, [*TEXT, 9, 7]), 0, 10)
    assert whole.shape == (10, 2 * model.hidden_size)
    assert (model.states(row, 0, 10) == whole).all()
    fork = model.fork(row, 4)
    assert (model.states(fork, 0, 4) == whole[:4]).all()
    model.extend([fork], [Nodes([*TEXT[4:], 9, 3, 7], [-1, 0, 1, 2, 3, 4, 4])])
    model.prune(fork, [0, 1, 2, 3, 4, 6], 4)
    assert (model.states(fork, 0, 10) == whole).all(), "the nodes of a row come behind its tokens"
    model.extend([before], [Nodes.chain([1])])  # a row from before keeps none
    assert model.states(before, 0, 1).shape == (1, 0)
    model.track_features(FeatureSpec((0,)))
    assert (model.states(row, 0, 10) == whole).all(), "it goes on with those that it keeps"
    assert row.has_features(FINAL_STATE) and not row.has_features(FeatureSpec((0,)))
    model.extend([row], [Nodes.chain([11] * 60)])
    model.commit(row, range(60))
    later = prefill(model, [*TEXT, 9, 7, *[11] * 60])
    assert (model.states(later, 0, 70)[:, : whole.shape[1]] == model.states(row, 0, 70)).all()
    with pytest.raises(UnsupportedModelError):
        model.track_features(FeatureSpec((model.layers + 1,)))


def test_a_model_in_parts_is_that_of_one_file(path: Path, tmp_path: Path) -> None:
    first, second = tiny_gguf.split(path, tmp_path)
    models = NativeModel(path), NativeModel(first)
    one, other = (model.extend([prefill(model, TEXT)], [NODES]).logits(range(5)) for model in models)
    assert (one == other).all()
    ids = np.arange(9)
    assert (models[0].embedding_rows(ids) == models[1].embedding_rows(ids)).all()
    second.write_bytes(second.read_bytes()[:-64])
    with pytest.raises(ModelFileError, match="is incomplete"):
        NativeModel(first)
    second.unlink()
    with pytest.raises(ModelFileError, match="cannot read"):
        NativeModel(first)


def test_what_the_file_says_is_found(model: NativeModel, path: Path) -> None:
    can = model.capabilities
    assert (can.architecture, can.max_length, can.vocab_size) == ("llama", 256, 274)
    assert can.eos_ids >= {tiny_gguf.END} and can.weight_format == "Q4_1"
    assert model.tokenizer is not None
    assert model.tokenizer.decode(model.tokenizer.encode("the cat")) == "the cat"


def test_capabilities_give_version_tier_threads_and_what_a_pass_reads(path: Path) -> None:
    """A profile of two threads was another's of one, and one of AVX2 that of AVX-512."""
    models = [NativeModel(path, name="tiny", tier=tier, threads=threads) for tier in tiers() for threads in (1, 2)]
    found = [(m.capabilities.engine, m.capabilities.tier, m.capabilities.threads) for m in models]
    assert found == [(f"native {VERSION}", tier, threads) for tier in tiers() for threads in (1, 2)]
    assert len({Identity.of(m).file_name for m in models}) == len(models)
    can, header = models[0].capabilities, check(path)
    read = {t.name: t for t in header.tensors if t.name != "token_embd.weight"}
    assert "output.weight" in read
    assert can.weight_bytes == sum(t.size for t in read.values())
    assert can.weights == sum(math.prod(t.shape) for t in read.values()) < can.parameters


def test_of_experts_those_of_a_token_are_counted(dense: Mapping[str, Dense]) -> None:
    can, layers, experts, used = NativeModel(dense["qwen3moe"].path, threads=1).capabilities, 2, 8, 3
    size = layers * 3 * 256 * 256  # numbers of an expert in each layer
    assert (can.expert_share, can.expert_bytes) == (used / experts, 4 * used * size)
    assert can.weight_bytes == 4 * can.weights
    norms, embeddings = layers * (2 * 256 + 2 * 64) + 256, can.vocab_size * 256
    attention, router = 256 * 64 * (4 + 2 + 2 + 4), 256 * experts
    assert can.weights == embeddings + norms + layers * (attention + router) + used * size
    assert can.parameters == can.weights + embeddings + (experts - used) * size


def test_wrong_options_are_one_line(path: Path) -> None:
    with pytest.raises(ConfigError, match="threads"):
        NativeModel(path, threads=0)
    with pytest.raises(ConfigError, match="mmx"):
        NativeModel(path, tier="mmx")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", sorted(FORMATS), ids=lambda kind: GGMLQuantizationType(kind).name)
def test_rows_of_weights_are_those_of_the_file(kind: int, tied: bool, tmp_path: Path) -> None:
    """To the bit, though they come out of the tiles that passes multiply by."""
    name, lacking = GGMLQuantizationType(kind).name, ("output.weight",) if tied else ()
    path = tiny_gguf.write(tmp_path / "m.gguf", layers=1, hidden=256, heads=8, weights=name, lacking=lacking)
    tensors = {each.name: each for each in gguf.GGUFReader(path).tensors}
    model = NativeModel(path)
    ids = np.random.default_rng(0).permutation(model.capabilities.vocab_size)
    for number, name in ((EMBEDDING, "token_embd.weight"), (OUTPUT, "token_embd.weight" if tied else "output.weight")):
        expected = gguf.dequantize(tensors[name].data, GGMLQuantizationType(kind))
        for some in (ids, ids[:1], ids[:0]):
            np.testing.assert_array_equal(
                model.loaded.rows(number, some).view(np.uint32), expected[some].view(np.uint32)
            )


@pytest.mark.parametrize("token", [-1, 274])
def test_there_are_no_rows_of_tokens_outside_the_vocabulary(token: int, model: NativeModel) -> None:
    with pytest.raises(CacheError):
        model.embedding_rows(np.array([0, token]))
