"""The corpus: its matches against a reading of the same texts, what is forgotten, its files, and servers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import draftree
from draftree.cli.main import run
from draftree.config import Budget, SamplingParams
from draftree.drafters import indexes as module
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.indexes import LONGEST, MATCHES, CorpusIndex, probabilities
from draftree.drafters.ngram import Corpus, CorpusSource, read_texts
from draftree.drafters.registry import load_drafter
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation, SpeculationParams
from draftree.errors import ConfigError
from draftree.policies.chains import CHAIN
from draftree.policies.fixed import StaticTree
from draftree.request import Request
from draftree.text.detokenizer import NoText

from ..lookups import Reference
from ..server.running import posted, running, target
from ..tiny import save_tiny, tiny_tokenizer
from ..toy import ToyModel

Captured = pytest.CaptureFixture[str]
Texts = Sequence[Sequence[int]]

SAID = "the cat in the hat sat on the mat"


def assert_longest(index: CorpusIndex, texts: Texts, tails: Texts) -> None:
    """It finds the longest matches, as many as it may, the longest first; all of them where there are no more."""
    reference = Reference(texts)
    for tail in (tail[-LONGEST:] for tail in tails):
        places, found = reference.search(tail), index.matches(tail)
        assert [n for _, _, n in found] == sorted((n for _, _, n in places), reverse=True)[:MATCHES]
        for text, at, length in found:
            assert [*text[at - length : at]] == [*tail[len(tail) - length :]] and text[at] >= 0
        if len(places) <= MATCHES:
            assert probabilities(found) == pytest.approx(reference.probabilities(places))


text_of = st.lists(st.integers(0, 2), min_size=2, max_size=30)
texts_of = st.lists(text_of, max_size=8)
tails_of = st.lists(st.lists(st.integers(0, 2), max_size=LONGEST + 2), min_size=10, max_size=10)
examples = settings(max_examples=60, deadline=None, derandomize=True)


@given(kept=texts_of, added=texts_of, tails=tails_of)
@examples
def test_it_finds_the_longest_matches_in_all_texts(kept: Texts, added: Texts, tails: Texts) -> None:
    index = CorpusIndex(1000)
    if kept:
        index.keep(kept)
    for text in added:
        index.add(text)
    assert_longest(index, [*kept, *added], [*tails, *(text[:5] for text in [*kept, *added])])


@given(kept=texts_of, added=st.lists(text_of, max_size=30), tails=tails_of, room=st.integers(3, 200))
@examples
def test_the_oldest_texts_that_were_added_are_forgotten(kept: Texts, added: Texts, tails: Texts, room: int) -> None:
    """What is left is the texts that were added last, whole but for one that is longer than the room, and all kept."""
    own = sum(len(text) + 1 for text in kept)
    index = CorpusIndex(own + room)
    if kept:
        index.keep(kept)
    for number, text in enumerate(added, start=1):
        index.add(text)
        assert len(index) <= own + room and index.bytes <= 8 * (own + room)
        left, size = list[Sequence[int]](), len(index) - own
        for earlier in reversed(added[:number]):
            if size:
                left.insert(0, earlier[1 - room :])
                size -= len(left[0]) + 1
        assert size == 0 and left
        assert sum(len(t) + 1 for t in left) > room - room // 16 - max(map(len, added)) - 1 or number == len(left)
    assert_longest(index, [*kept, *left] if added else kept, tails)


def test_few_blocks_hold_many_texts_and_none_grows_beyond_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGEST", 500)
    texts = [[i % 7, i % 5, i % 3, i % 11] for i in range(1000)]
    index = CorpusIndex(10_000)
    for text in texts:
        index.add(text)
    assert len(index) == 5000
    assert max(map(len, index._blocks)) <= 500 and len(index._blocks) <= 14
    assert_longest(index, texts, [[a, b] for a in range(7) for b in range(5)])


def test_a_short_text_leaves_large_blocks_as_they_are() -> None:
    index = CorpusIndex(10_000)
    index.add([1, 2, 3] * 300)
    large = index._blocks[0]
    index.add([4, 5, 6])
    assert index._blocks[0] is large and len(index._blocks) == 2
    index.add([4, 5, 6] * 20)
    assert len(index._blocks) == 1


def test_of_equally_long_matches_the_latest_are_found() -> None:
    cycle = [*range(LONGEST)]
    index = CorpusIndex(20_000)
    index.add([*cycle, 20] * 30 + [*cycle, 21] * 12)
    assert [text[at] for text, at, _ in index.matches(cycle)] == [21] * 12 + [20] * 4
    index.add([*cycle, 22])
    assert [text[at] for text, at, _ in index.matches(cycle)] == [22] + [21] * 12 + [20] * 3


def request_of(ids: Sequence[int]) -> Request:
    return Request(ids, SamplingParams(), 100, frozenset(), NoText())


def drafted(source: CorpusSource, ids: Sequence[int], depth: int = 3) -> list[int]:
    request = request_of(ids)
    source.open(request)
    found = TreeDrafter(StaticTree(width=1, depth=depth), source).propose([request], [Budget(depth)])[0].tokens
    return list(found.tolist())


def ended(source: CorpusSource, prompt: Sequence[int], output: Sequence[int]) -> Request:
    request = request_of(prompt)
    source.open(request)
    request.ids += output
    source.close(request)
    return request


def test_an_output_is_drafted_from_once_its_request_has_ended() -> None:
    source = CorpusSource(Corpus(outputs=True))
    assert source.learns
    request = ended(source, [1, 2, 3], [4, 5, 6])
    assert drafted(source, [9, 2, 3]) == [4, 5, 6]
    before = len(source.corpus._index)
    source.close(request)
    source.close(request_of([1, 2, 3, 4]))
    ended(source, [1, 2, 3], [])
    assert len(source.corpus._index) == before, "a request's output counts once, a prompt alone not at all"


def test_of_a_prompt_only_its_end_is_kept() -> None:
    source = CorpusSource(Corpus(outputs=True))
    ended(source, range(100, 150), [4, 5])
    assert drafted(source, [100, 101]) == []
    assert drafted(source, [148, 149]) == [4, 5]


def test_outputs_are_not_kept_unless_they_are_wanted() -> None:
    source = CorpusSource(Corpus())
    ended(source, [1, 2, 3], [4, 5, 6])
    assert not source.learns and drafted(source, [2, 3]) == []


def test_drafters_share_a_corpus() -> None:
    shared = Corpus(outputs=True)
    one, other = CorpusSource(shared), CorpusSource(shared)
    ended(one, [1, 2, 3], [4, 5, 6])
    assert drafted(other, [2, 3]) == [4, 5, 6]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["corpus", "corpus+lookup"])
def test_the_same_prompt_again_takes_fewer_steps_and_has_the_same_text(name: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=3)
    prompts = [[1, 2, 3, 1], [4, 0, 2]]
    wanted = Engine(ToyModel()).generate(prompts, params)
    made = load_drafter(name, ToyModel(), CHAIN, corpus=Corpus(outputs=True))
    engine = Engine(ToyModel(), Speculation(made, 8))
    first, again = engine.generate(prompts, params), engine.generate(prompts, params)
    for found in (first, again):
        assert [g.token_ids for g in found] == [g.token_ids for g in wanted]
    assert sum(g.stats.steps for g in again) < sum(g.stats.steps for g in first)


def test_a_server_drafts_from_the_answers_before_whatever_method_a_request_chooses() -> None:
    speculation = SpeculationParams(drafter="corpus", method="chain", corpus=Corpus(outputs=True))
    body = {"prompt": "a b a b a b", "max_tokens": 24, "temperature": 0}
    with running(speculation=speculation) as served:
        first = posted(served, "/v1/completions", body)[1]
        served.settle()
        for more in ({}, {"draftree": {"method": "static", "nodes": 6}}):
            again = posted(served, "/v1/completions", body | more)[1]
            assert again["choices"][0]["text"] == first["choices"][0]["text"]
            steps = [found["metrics"]["speculative_decoding"]["num_spec_steps"] for found in (first, again)]
            assert steps[1] < steps[0]
        status, plain = posted(served, "/v1/completions", body | {"draftree": {"drafter": "none"}})
        assert status == 200 and plain["choices"][0]["text"] == first["choices"][0]["text"]


class TestFiles:
    def test_a_text_is_drafted_from(self, tmp_path: Path) -> None:
        (tmp_path / "said.txt").write_text(SAID)
        made = load_drafter("corpus", target(), CHAIN, corpus=Corpus([tmp_path / "said.txt"]))
        assert not made.learns
        made.prepare(target())
        ids = tiny_tokenizer().encode(SAID)
        request = request_of(ids[:3])
        made.open(request)
        assert made.propose([request], [Budget(4)])[0].tokens.tolist() == ids[3:7]

    def test_lines_have_text_under_the_names_of_training_sets(self, tmp_path: Path) -> None:
        rows = [{"text": "one"}, {"prompt": "two ", "completion": "three"}, {"prompt": "four", "id": 4, "text": None}]
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
        assert read_texts(str(path)) == ["one", "two three", "four"]

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("a.txt", b"", "a.txt is empty"),
            ("a.txt", b" \n", "a.txt is empty"),
            ("a.txt", b"\xff\xfe\x00 no text", "a.txt is not valid UTF-8"),
            ("a.jsonl", b'{"text": "x"}\nx', "a.jsonl line 2 is not JSON"),
            ("a.jsonl", b'{"colour": "red"}', 'a.jsonl line 1 has no "text", "prompt" or "completion"'),
            ("a.jsonl", b'{"text": 3, "prompt": ""}', "a.jsonl line 1 has no"),
            ("a.jsonl", b"[1]", "a.jsonl line 1 has no"),
            ("a.jsonl", b"[" * 100_000, "a.jsonl line 1 is not JSON"),
        ],
    )
    def test_a_file_without_text_is_refused(self, name: str, content: bytes, said: str, tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=re.escape(said)):
            Corpus([tmp_path / name])

    def test_what_is_no_file_is_refused(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "missing"):
            with pytest.raises(ConfigError, match=f"cannot read corpus {path}: .*: give a text file"):
                Corpus([path])

    def test_files_that_take_more_than_the_memory_are_refused_with_what_they_need(self, tmp_path: Path) -> None:
        (tmp_path / "long.txt").write_text("0123456789" * 14_000)
        for outputs, needed in ((False, 2), (True, 3)):
            with pytest.raises(ConfigError, match=f"is 1 MiB: the files need {needed} "):
                Corpus([tmp_path / "long.txt"], outputs=outputs, memory=1).prepare(target())
            made = Corpus([tmp_path / "long.txt"], outputs=outputs, memory=needed)
            made.prepare(target())
            assert 1 << 20 < made._index.bytes <= needed << 20

    def test_a_model_without_a_tokenizer_cannot_read_them(self, tmp_path: Path) -> None:
        (tmp_path / "said.txt").write_text(SAID)
        with pytest.raises(ConfigError, match="the model has no tokenizer"):
            Corpus([tmp_path / "said.txt"]).prepare(ToyModel())

    def test_a_corpus_is_of_one_vocabulary(self) -> None:
        made = Corpus(outputs=True)
        made.prepare(ToyModel(5))
        made.prepare(ToyModel(5))
        with pytest.raises(ConfigError, match="two vocabularies"):
            made.prepare(ToyModel(6))

    @pytest.mark.parametrize("memory", [0, -1, 16384])
    def test_a_memory_out_of_range_is_refused(self, memory: int) -> None:
        with pytest.raises(ConfigError, match=f"corpus memory is {memory} MiB: use 1 to 16383"):
            Corpus(memory=memory)


class TestNames:
    """Before any model is loaded."""

    def test_a_corpus_and_its_drafter_need_each_other(self) -> None:
        with pytest.raises(ConfigError, match="drafter corpus has no texts"):
            draftree.load_engine("./nowhere", draftree.SpeculationParams(drafter="lookup+corpus"))
        for name in ("auto", "lookup", "recycle>self"):
            with pytest.raises(ConfigError, match=f"drafter {name} does not draft from a corpus: use corpus"):
                draftree.load_engine("./nowhere", draftree.SpeculationParams(drafter=name, corpus=Corpus()))

    def test_drawn_children_may_come_from_files_but_not_from_outputs(self) -> None:
        options: dict[str, Any] = {"drafter": "corpus", "method": "static", "verification": "multi-round"}
        SpeculationParams(**options, corpus=Corpus())
        with pytest.raises(ConfigError, match="corpora of outputs learn from all requests"):
            SpeculationParams(**options, corpus=Corpus(outputs=True))

    def test_it_drafts_no_beams(self) -> None:
        with pytest.raises(ConfigError, match="corpus drafts one sequence, not beams"):
            draftree.load_beam_engine("./nowhere", drafter="corpus")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a text, and prompts."""
    made = tmp_path_factory.mktemp("corpus")
    save_tiny(made / "model")
    (made / "said.txt").write_text(SAID)
    (made / "own.jsonl").write_text('{"prompt": "the cat in the hat"}\n')
    return made


class TestCommands:
    def test_generate_drafts_from_a_file(self, folder: Path, tmp_path: Path, capsys: Captured) -> None:
        words = ["generate", "the cat in", "--raw", "--target", str(folder / "model"), "--max-tokens", "20", "--json"]
        assert run([*words, "--drafter", "none"]) == 0
        plain = json.loads(capsys.readouterr().out)
        (tmp_path / "answers.jsonl").write_text(json.dumps({"prompt": "the cat in", "completion": plain["text"]}))
        corpus = [
            "--drafter",
            "corpus",
            "--corpus",
            str(tmp_path / "answers.jsonl"),
            "--corpus",
            str(folder / "own.jsonl"),
        ]
        assert run([*words, "--drafter", "corpus", *corpus, "--method", "chain"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["text"] == plain["text"] and found["stats"]["accepted"] > 0

    @pytest.mark.parametrize("more", [[], ["--replay"]])
    def test_bench_measures_it_on_files(self, more: list[str], folder: Path, tmp_path: Path) -> None:
        words = ["bench", "--suite", str(folder / "own.jsonl"), "--target", str(folder / "model"), "--max-tokens", "9"]
        words += ["--methods", "chain", "--out", str(tmp_path / "run"), "--corpus", str(folder / "said.txt"), *more]
        assert run([*words, "--drafters", "corpus,lookup"]) == 0
        config = json.loads((tmp_path / "run" / "config.json").read_text())
        assert str(folder / "said.txt") in config["files"]
        assert [entry["corpus"] for entry in config["entries"]] == [[], [str(folder / "said.txt")], []]

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("generate a --drafter corpus", "drafter corpus has no texts"),
            ("generate a --drafter corpus --corpus missing", "cannot read corpus missing"),
            ("generate a --drafter lookup --corpus {said}", "drafter lookup does not draft from a corpus"),
            ("generate a --corpus {said}", "drafter auto does not draft from a corpus: use corpus, or corpus+lookup"),
            ("generate a --drafter corpus --corpus-memory 3", "--corpus-memory 3 is of a corpus: name files"),
            ("generate a --drafter corpus --corpus {said} --corpus-memory 0", "corpus memory is 0 MiB"),
            ("generate a --beams 2 --drafter corpus --corpus {said}", "--beams and --corpus exclude each other"),
            ("serve --drafter corpus", "drafter corpus has no texts"),
            ("bench --suite {own} --out {out} --drafters corpus", "drafter corpus has no texts"),
            ("bench --suite {own} --out {out} --drafters lookup --corpus {said}", "no drafter drafts from it"),
            ("calibrate --prompts {own} --out {out} --drafter corpus", "drafter corpus has no texts"),
        ],
    )
    def test_bad_input_is_one_line(self, line: str, said: str, folder: Path, tmp_path: Path, capsys: Captured) -> None:
        places = {"{said}": folder / "said.txt", "{own}": folder / "own.jsonl", "{out}": tmp_path / "out"}
        words = [str(places.get(word, word)) for word in line.split()]
        assert run(words) == 2
        printed = capsys.readouterr()
        assert said in " ".join(printed.err.split()) and not printed.out
