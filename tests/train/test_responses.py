"""Responses: the target's own, whatever they share a batch with, and safe on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from pathlib import Path

import pytest
import torch

from draftree.artifacts import write_whole
from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.errors import ConfigError, ModelFileError, PromptError, RunError
from draftree.models.base import FINAL_STATE, FeatureSpec, Row, prefill
from draftree.models.huggingface.cache import bytes_of, feature_part
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.native.native_model import NativeModel
from draftree.text.encoding import Conversation, render, user
from draftree.train import head_data, responses, shards
from draftree.train.head_data import HeadData, by_length
from draftree.train.responses import TEMPERATURES, DataRecipe, Response, digest, encoded, respond, shuffled

from .. import tiny_gguf
from ..heads import PROMPTS
from ..tiny import tiny, tiny_tokenizer

RECIPE = DataRecipe(target="tiny", prompts="p", max_tokens=20, seed=0, dtype="float32")


@pytest.fixture(scope="module")
def target() -> HFModel:
    model = HFModel(tiny(), self_test=False)
    model.track_features()
    return model


@pytest.mark.parametrize("rows", [1, 3])
def test_responses_are_what_ar_decoding_says(rows: int, target: HFModel) -> None:
    found = {r.number: r for r in respond(target, PROMPTS, [3, 0, 2, 1], rows=rows, max_tokens=20, seed=5)}
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=20, temperature=TEMPERATURES[number], seed=5 + number)
        row = found[number]
        assert row.tokens[row.prompt_length :].tolist() == Engine(target).generate([prompt], params)[0].token_ids
        assert (row.prompt_length, row.gained, row.temperature) == (len(prompt), 20, TEMPERATURES[number])


def test_no_text_is_made_of_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads it, and transformers' tokenizers take long for it."""
    made = HFModel(tiny(), tiny_tokenizer(), self_test=False)
    assert made.tokenizer is not None
    monkeypatch.setattr(type(made.tokenizer), "decode", None)
    assert [r.gained for r in respond(made, PROMPTS[:2], range(2), rows=2, max_tokens=8, seed=0)] == [8, 8]


def test_their_hidden_states_are_those_of_their_tokens(target: HFModel) -> None:
    for r in respond(target, PROMPTS, range(4), rows=2, max_tokens=20, seed=0):
        causal = target.model.base_model(input_ids=r.tokens[None], use_cache=False)[0][0]
        assert r.features.dtype == torch.float16
        assert torch.allclose(r.features.float(), causal[:-1], atol=1e-2)


def test_hidden_states_of_the_native_engine_are_those_of_the_whole_text(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", layers=3, hidden=64, heads=2, kv_heads=1, context=512)
    native, layers = NativeModel(path), FeatureSpec((1, *FINAL_STATE.layers))
    native.track_features(layers)
    drawn = respond(native, PROMPTS, range(4), rows=3, max_tokens=20, seed=0, states=native.hidden_states)
    for r in sorted(drawn, key=lambda r: r.number):
        row = prefill(native, r.tokens[:-1].tolist())
        whole = torch.from_numpy(native.states(row, 0, len(r.tokens) - 1))
        assert (r.tracked, r.features.dtype) == (layers, torch.float16)
        assert torch.equal(r.features, whole.half())
        native.close(row)
    assert native.rows == 0


def store(drawn: Sequence[Response], target: HFModel, folder: Path, patch: pytest.MonkeyPatch) -> HeadData:
    """Responses kept as if they had been drawn; a shard is full with two of them."""
    patch.setattr(head_data, "SHARD_TOKENS", 40)
    patch.setattr(head_data, "respond", lambda *given, **options: (r for r in drawn))
    data = HeadData(folder, RECIPE, PROMPTS)
    data.collect(target, tokens=1000, seconds=60, rows=1, progress=lambda done: None)
    return data


def test_what_is_stored_is_what_is_read(target: HFModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list(respond(target, PROMPTS, [2, 0, 1, 3], rows=4, max_tokens=20, seed=0))
    store(drawn[:3], target, tmp_path / "work", monkeypatch)
    data = HeadData(tmp_path / "work", RECIPE, PROMPTS)  # as another run does
    assert (data.numbers, data.tokens) == ({r.number for r in drawn[:3]}, 60)
    store(drawn[3:], target, tmp_path / "work", monkeypatch)
    assert len(list((tmp_path / "work").glob("responses-*"))) > 1
    again = HeadData(tmp_path / "work", RECIPE, PROMPTS).responses()
    for one, two in zip(sorted(drawn, key=lambda r: r.number), again, strict=True):
        assert (one.number, one.prompt_length) == (two.number, two.prompt_length)
        assert (one.temperature, one.gained) == (two.temperature, two.gained)
        assert torch.equal(one.tokens, two.tokens)
        assert torch.equal(one.features, two.features)
        assert one.tracked == two.tracked


def test_responses_are_kept_as_time_goes_by(target: HFModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model takes half an hour for the tokens of a shard, which a kill then lost."""
    monkeypatch.setattr(head_data, "SHARD_SECONDS", 0.0)
    data, kept = HeadData(tmp_path, RECIPE, PROMPTS), list[int]()

    def count(_: int) -> None:
        kept.append(len(list(tmp_path.glob("responses-*"))))

    data.collect(target, tokens=80, seconds=60, rows=1, progress=count)
    assert kept == [0, 1, 2, 3]


def test_hidden_states_of_layers_come_with_a_response(tmp_path: Path) -> None:
    """Those of a layer are large here, as some models' are at their first token: float16 holds 65504 at most."""
    model, wanted = HFModel(tiny(), self_test=False), FeatureSpec((0, 1)) | FINAL_STATE
    with torch.no_grad():
        model.model.get_input_embeddings().weight.mul_(1e6)
    model.track_features(wanted)
    data = HeadData(tmp_path / "a", RECIPE, PROMPTS, model.tracked)
    data.collect(model, tokens=40, seconds=60, rows=2, progress=lambda done: None)
    for response in data.responses():
        assert response.tracked == wanted
        embedded = model.embeddings(response.tokens[:-1]).clamp(-65504, 65504)
        found = feature_part(response.tracked, response.features, FeatureSpec((0,))).float()
        assert bool(response.features.isfinite().all()) and torch.allclose(found, embedded, rtol=1e-2)
    with pytest.raises(ConfigError, match="other models.*--out"):
        HeadData(tmp_path / "a", RECIPE, PROMPTS)


def test_a_shard_that_was_removed_costs_its_own_responses_alone(
    target: HFModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new shard was called by how many there were: after the first of three was removed, as the message about a
    corrupt one says, it overwrote the third."""
    drawn = [next(respond(target, PROMPTS, [n], rows=1, max_tokens=20, seed=0)) for n in range(4)]
    for one in drawn[:3]:
        store([one], target, tmp_path / "work", monkeypatch)
    (tmp_path / "work" / "responses-00000000.safetensors").unlink()
    store(drawn[3:], target, tmp_path / "work", monkeypatch)
    assert HeadData(tmp_path / "work", RECIPE, PROMPTS).numbers == {1, 2, 3}


def test_a_run_that_is_killed_behind_its_first_shard_goes_on(
    target: HFModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe was written after the first shard; a folder without one is refused."""
    written: list[str] = []

    def killed(path: Path, content: str | bytes) -> None:
        if written:
            raise SystemExit
        write_whole(path, content)
        written.append(path.name)

    drawn = list(respond(target, PROMPTS, [0], rows=1, max_tokens=20, seed=0))
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(shards, "write_whole", killed)
        store(drawn, target, tmp_path / "work", patch)
    assert written == ["recipe.json"]
    assert not HeadData(tmp_path / "work", RECIPE, PROMPTS).numbers


def test_a_truncated_shard_is_named(target: HFModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(list(respond(target, PROMPTS, [0], rows=1, max_tokens=5, seed=0)), target, tmp_path / "work", monkeypatch)
    shard = tmp_path / "work" / "responses-00000000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ModelFileError, match=r"responses-00000000"):
        HeadData(tmp_path / "work", RECIPE, PROMPTS)


def test_a_full_disk_is_one_line(target: HFModel, tmp_path: Path, full_disk: None) -> None:
    data = HeadData(tmp_path / "work", RECIPE, PROMPTS)
    with pytest.raises(RunError, match="room there"):
        data.collect(target, tokens=1000, seconds=60, rows=1, progress=lambda done: None)
    assert not list((tmp_path / "work").iterdir())


def test_interrupted_drawing_goes_on_and_ends_the_same(target: HFModel, tmp_path: Path) -> None:
    whole = HeadData(tmp_path / "whole", RECIPE, PROMPTS)
    whole.collect(target, tokens=1000, seconds=60, rows=2, progress=lambda done: None)

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    data = HeadData(tmp_path / "part", RECIPE, PROMPTS)
    with pytest.raises(KeyboardInterrupt):
        data.collect(target, tokens=1000, seconds=60, rows=2, progress=interrupt)
    data = HeadData(tmp_path / "part", RECIPE, PROMPTS)
    assert len(data.numbers) == 1
    data.collect(target, tokens=1000, seconds=60, rows=2, progress=lambda done: None)
    found = [HeadData(tmp_path / name, RECIPE, PROMPTS).responses() for name in ("whole", "part")]
    for one, two in zip(*found, strict=True):
        assert torch.equal(one.tokens, two.tokens)
        assert torch.allclose(one.features.float(), two.features.float(), atol=1e-2)


def test_rows_that_do_not_fit_a_devices_memory_are_one_line(
    target: HFModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> Iterator[Response]:
        yield next(respond(target, PROMPTS, [2], rows=1, max_tokens=20, seed=0))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(head_data, "respond", full)
    data = HeadData(tmp_path / "a", RECIPE, PROMPTS)
    with pytest.raises(RunError, match="7 rows .*--rows"):
        data.collect(target, tokens=1000, seconds=60, rows=7, progress=lambda done: None)
    assert HeadData(tmp_path / "a", RECIPE, PROMPTS).numbers == {2}


def test_drawing_stops_at_the_tokens_or_the_time(target: HFModel, tmp_path: Path) -> None:
    data = HeadData(tmp_path / "a", RECIPE, PROMPTS)
    data.collect(target, tokens=21, seconds=60, rows=1, progress=lambda done: None)
    assert data.tokens == 40
    data.collect(target, tokens=1000, seconds=0, rows=1, progress=lambda done: None)
    assert data.tokens == 40
    data.collect(target, tokens=1000, seconds=60, rows=1, progress=lambda done: None)
    assert (data.tokens, data.numbers) == (80, {0, 1, 2, 3})


def test_the_first_prompts_are_kept_apart(target: HFModel, tmp_path: Path) -> None:
    data = HeadData(tmp_path / "a", RECIPE, PROMPTS)
    data.collect(target, tokens=1000, seconds=60, rows=4, progress=lambda done: None)
    learned, apart = data.split(1)
    assert ([r.number for r in learned], [r.number for r in apart]) == ([1, 2, 3], [0])


def test_further_responses_to_a_prompt_are_sampled_and_others(target: HFModel, tmp_path: Path) -> None:
    data = HeadData(tmp_path / "a", RECIPE, PROMPTS)
    data.collect(target, tokens=1000, seconds=60, rows=4, progress=lambda done: None, answers=3, held_out=1)
    found = {r.number: r for r in data.responses()}
    assert sorted(found) == [0, 1, 2, 3, 5, 6, 7, 9, 10, 11]  # the first prompt is kept apart, and answered once
    assert [found[n].temperature for n in (5, 6, 7, 9, 10, 11)] == [0.7, 1.0, 0.7, 1.0, 0.7, 1.0]
    for number, response in found.items():
        prompt = PROMPTS[number % 4]
        assert response.tokens[: response.prompt_length].tolist() == prompt
        params = SamplingParams(max_tokens=20, temperature=response.temperature, seed=number)
        assert (
            response.tokens[response.prompt_length :].tolist() == Engine(target).generate([prompt], params)[0].token_ids
        )
    assert len({tuple(found[n].tokens.tolist()) for n in (3, 7, 11)}) == 3
    learned, apart = data.split(1)
    assert ([r.number for r in learned], [r.number for r in apart]) == ([1, 2, 3, 5, 6, 7, 9, 10, 11], [0])


def test_responses_of_another_recipe_are_refused(target: HFModel, tmp_path: Path) -> None:
    data = HeadData(tmp_path / "a", RECIPE, PROMPTS)
    data.collect(target, tokens=20, seconds=60, rows=1, progress=lambda done: None)
    other = DataRecipe(target="tiny", prompts="p", max_tokens=21, seed=0, dtype="float32")
    with pytest.raises(ConfigError, match="other models.*--out"):
        HeadData(tmp_path / "a", other, PROMPTS)


def test_prompts_come_once_each_in_the_seeds_order() -> None:
    files = [["a", "b", "c"], ["b", "d"]]
    assert sorted(shuffled(files, 0)) == ["a", "b", "c", "d"]
    assert shuffled(files, 0) == shuffled(files, 0)
    assert len({tuple(shuffled(files, seed)) for seed in range(9)}) > 1


def test_prompts_of_like_length_are_answered_together(target: HFModel, tmp_path: Path) -> None:
    assert by_length([3, 1, 2, 6, 9, 7, 5, 4], 3) == [1, 2, 0, 4, 5, 3, 7, 6]
    assert sorted(by_length([len(p) for p in PROMPTS], 2)) == list(range(len(PROMPTS)))
    prompts = [[1] * n for n in (4, 2, 5, 3)]
    data = HeadData(tmp_path / "a", RECIPE, prompts)
    data.collect(target, tokens=21, seconds=60, rows=1, progress=lambda done: None)
    assert data.numbers == {1, 3}  # the two shortest


def test_prompts_that_are_too_long_are_left_out(target: HFModel, capsys: pytest.CaptureFixture[str]) -> None:
    model = HFModel(tiny(), tiny_tokenizer(), self_test=False)
    assert len(encoded(model, ["the cat"], raw=True)) == 1
    assert capsys.readouterr().err == ""
    assert len(encoded(model, ["the cat", "a" * 200], raw=True)) == 1
    assert capsys.readouterr().err == "1 of 2 prompts are longer than 64 tokens and left out\n"
    with pytest.raises(PromptError, match="64 tokens"):
        encoded(model, ["a" * 200], raw=True)
    assert digest([[1, 2], [3]]) != digest([[1], [2, 3]])


def test_a_template_that_writes_the_date_gives_the_same_prompts_on_another_day(tmp_path: Path) -> None:
    """A training that went on after midnight was told that its prompts were others."""
    template = "{{ strftime_now('%d/%m/%Y') }} {{ messages[0]['content'] }}"
    path = tiny_gguf.write(tmp_path / "model.gguf", layers=1, template=template)
    model = NativeModel(path)
    assert encoded(model, ["the cat"], raw=False) == encoded(model, ["01/01/2026 the cat"], raw=True)
    assert model.tokenizer is not None
    days = [date.today(), date.today()]
    days[1:1] = [datetime.strptime(render(model.tokenizer, Conversation(user("a")))[:10], "%d/%m/%Y").date()]
    assert days == sorted(days)


def test_no_more_rows_are_opened_than_the_cache_holds(tmp_path: Path) -> None:
    """Where the memory was little all rows ended with the pass that found it full, most of them not finished."""
    path = tiny_gguf.write(tmp_path / "model.gguf", layers=1, context=512)
    model, most = NativeModel(path), list[int]()
    model.cache_bytes = 4 * model.loaded.page_bytes + 2 * model.loaded.row_bytes  # a row has a page more than it fills
    opened = model.open

    def noted() -> Row:
        row = opened()
        most.append(model.rows)
        return row

    model.open = noted  # type: ignore[method-assign]
    found = respond(model, PROMPTS, range(4), rows=4, max_tokens=20, seed=0)
    assert sorted(r.number for r in found) == [0, 1, 2, 3]
    assert max(most) == 2


@pytest.mark.parametrize(("held", "expected"), [(0, 1), (1, 1), (3, 3), (9, 4)])
def test_no_more_rows_are_reserved_than_the_cache_holds(
    held: int, expected: int, target: HFModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved, longest = list[int](), max(map(len, PROMPTS)) + 20
    monkeypatch.setattr(target, "cache_bytes", bytes_of([longest] * held, target.capabilities.slot_bytes))
    monkeypatch.setattr(target, "reserve", lambda rows, tokens: reserved.append(rows))
    assert len([*respond(target, PROMPTS, range(4), rows=4, max_tokens=20, seed=0)]) == 4
    assert reserved == [expected]


def test_the_prompts_that_ship_differ_and_start_with_every_kind() -> None:
    path = Path(responses.__file__).with_name("prompts.jsonl")
    kinds = [json.loads(line)["kind"] for line in path.read_text("utf-8").splitlines()]
    prompts, _ = responses.read_prompts(str(path))
    assert len(kinds) == len(prompts) == len(set(prompts)) >= 400
    assert set(kinds[:40]) == set(kinds)
