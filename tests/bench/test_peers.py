"""Rival systems on tiny models: the same tokens, and what they tell of their time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftree.bench import contestants, transformers_peer
from draftree.bench.contestants import EngineContestant, Models
from draftree.bench.entries import LLAMA_CPP, Entry, entries
from draftree.bench.results import AnswerRecord, Parts
from draftree.config import SamplingParams
from draftree.errors import ConfigError
from draftree.models.huggingface.hf_loading import load_stock
from draftree.models.loading import load
from draftree.policies.base import Provenance

from ..references import generate_greedily
from ..tiny import VOCAB, save_tiny, tiny, tiny_tokenizer
from ..tiny_gguf import write

PROMPT = [7, 8, 9, 7, 8, 9, 7, 8]
GREEDY = SamplingParams(max_tokens=20, seed=3)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("models") / "other", seed=1))


@pytest.mark.parametrize("name", ["hf-generate", "hf-prompt-lookup", "hf-assisted"])
def test_transformers_decodes_its_own_greedy_tokens(name: str, model: str, other: str) -> None:
    (_, entry) = entries([f"peer:{name}"], [other], [0.0], 4)
    turn = Models(model).contestant(entry).decode(PROMPT, GREEDY)
    assert turn.ids == generate_greedily(load_stock(model)[0], PROMPT, 20)
    assert turn.passes is not None and 0 < turn.passes <= len(turn.ids)
    assert name != "hf-generate" or turn.passes == len(turn.ids)
    prefill = turn.seconds.prefill
    assert prefill is not None and 0 < prefill < turn.seconds.total


def test_the_assistant_saves_passes_where_it_is_right(model: str, tmp_path: Path) -> None:
    """A copy of the target as its assistant: all its drafts are accepted, and its passes are not the target's."""
    copy = str(save_tiny(tmp_path / "copy"))
    assisted = Models(model).contestant(Entry("x", "peer:hf-assisted", copy, 0.0))
    turn = assisted.decode(PROMPT, GREEDY)
    assert turn.passes is not None and turn.passes <= len(turn.ids) // 2


def test_sampling_is_repeatable_and_leaves_the_global_generator_alone(model: str) -> None:
    (_, entry) = entries(["peer:hf-generate"], ["lookup"], [1.0], 4)
    peer = Models(model).contestant(entry)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5)
    state = torch.random.get_rng_state()
    assert peer.decode(PROMPT, params).ids == peer.decode(PROMPT, params).ids
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("method", ["peer:hf-assisted", "chain", "beams:drafter={}"])
def test_the_models_behind_a_contestant_are_known_by_their_weights(method: str, model: str, tmp_path: Path) -> None:
    def made_of(seed: int) -> Provenance:
        drafter = str(save_tiny(tmp_path / "draft", seed=seed))
        return Models(model).contestant(entries([method.format(drafter)], [drafter], [0.0])[1]).made_of

    first, other = made_of(1), made_of(2)
    assert first == made_of(1)
    assert replace(other, drafter_weights=first.drafter_weights) == first != other
    assert first.target_weights == load(model).capabilities.fingerprint


def test_an_assistant_of_another_vocabulary_is_a_line(model: str, tmp_path: Path) -> None:
    """transformers raises a bare ValueError in its first answer."""
    larger, other = tiny(seed=1), str(tmp_path / "other")
    larger.resize_token_embeddings(VOCAB + 8)
    larger.save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    (_, entry) = entries(["peer:hf-assisted"], [other], [0.0], 4)
    with pytest.raises(ConfigError, match=f"{VOCAB} tokens and .* {VOCAB + 8}"):
        Models(model).contestant(entry)


def test_models_are_loaded_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, load = [0], load_stock

    def counted(*what: Any, **options: Any) -> Any:
        count[0] += 1
        return load(*what, **options)

    monkeypatch.setattr(transformers_peer, "load_stock", counted)
    models = Models(model)
    for entry in entries(["peer:hf-generate", "peer:hf-prompt-lookup"], ["lookup"], [0.0], 4)[1:]:
        models.contestant(entry)
    assert count == [1]


def test_llama_cpp_is_loaded_once_for_all_temperatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, file = list[str | None](), str(write(tmp_path / "tiny.gguf"))

    def counted(name: str, **options: Any) -> Any:
        loaded.append(options.get("backend"))
        return load(name, **options)

    monkeypatch.setattr(contestants, "load", counted)
    models = Models(file)
    for entry in entries([f"peer:{LLAMA_CPP}"], [], [0.0, 0.5, 1.0]):
        models.contestant(entry)
    assert loaded == [None, LLAMA_CPP]


@pytest.mark.parametrize("name", ["hf-generate", "hf-prompt-lookup", "hf-assisted", "hf-beam-search"])
def test_torch_has_the_threads_of_the_target_while_a_peer_decodes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers ran on as many threads as torch takes by itself, beside a target of one."""
    used, load = set[int](), load_stock

    def watched(*what: Any, **options: Any) -> Any:
        model, tokenizer = load(*what, **options)
        model.register_forward_hook(lambda *_: used.add(torch.get_num_threads()))
        return model, tokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(transformers_peer, "load_stock", watched)
    target, draft = (str(write(tmp_path / name)) for name in ("target.gguf", "draft.gguf"))
    (_, entry) = entries([f"peer:{name}"], [draft], [0.0])
    peer = Models(target, threads=1).contestant(entry)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        peer.decode(PROMPT, GREEDY)
        assert (used, torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)


def test_only_the_distribution_that_was_asked_for_counts(model: str, tmp_path: Path) -> None:
    """Checkpoints come with repetition penalties of their own, which ``generate`` would take up."""
    copy = save_tiny(tmp_path / "copy")
    config = copy / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "repetition_penalty": 9.0}))
    (_, entry) = entries(["peer:hf-generate"], ["lookup"], [0.0], 4)
    plain, own = (generate_greedily(load_stock(name)[0], PROMPT, 20) for name in (model, str(copy)))
    assert own != plain
    assert Models(str(copy)).contestant(entry).decode(PROMPT, GREEDY).ids == plain


def test_tokens_that_come_with_the_prefill_are_not_counted_as_decoded(model: str, tmp_path: Path) -> None:
    """Assisted decoding accepts its first draft in the pass that reads the prompt."""
    copy = str(save_tiny(tmp_path / "copy"))
    turn = Models(model).contestant(Entry("x", "peer:hf-assisted", copy, 0.0)).decode(PROMPT, GREEDY)
    assert 1 < turn.first < len(turn.ids)
    (_, entry) = entries(["peer:hf-generate"], ["lookup"], [0.0], 4)
    assert Models(model).contestant(entry).decode(PROMPT, GREEDY).first == 1
    told = replace(turn, ids=list(range(20)), seconds=Parts(3.0, prefill=1.0), first=10)
    assert AnswerRecord("p", "c", "m", None, 0.0, 1, [told]).decode_rate == 5.0


def test_llama_cpp_decodes_the_same_file_by_one_token_a_pass(tmp_path: Path) -> None:
    file = str(write(tmp_path / "tiny.gguf"))
    own, peer = (Models(file).contestant(entry) for entry in entries([f"peer:{LLAMA_CPP}"], [], [0.0]))
    made = [contestant.engine.target for contestant in (own, peer) if isinstance(contestant, EngineContestant)]
    assert [target.capabilities.engine.split()[0] for target in made] == ["native", LLAMA_CPP]
    turn = peer.decode(PROMPT, GREEDY)
    assert turn.passes == len(turn.ids) - 1 > 5
