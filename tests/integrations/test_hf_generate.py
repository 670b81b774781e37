"""The engine as a drop-in for transformers' ``model.generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel, SynthIDTextWatermarkingConfig

import draftree
from draftree.errors import ConfigError
from draftree.models.heads.eagle_network import save_head
from draftree.models.huggingface.hf_model import HFModel

from ..heads import DRAFTED, random_network
from ..tiny import VOCAB, save_tiny, tiny

PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 14, 15]])
FULL = torch.ones_like(PROMPT)
PADDED = torch.tensor([[0, 0, 0, 3, 14, 15], [1, 2, 3, 4, 5, 6], [0, 7, 8, 9, 8, 7]])
SEEN = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6, [0, 1, 1, 1, 1, 1]])
TREES = draftree.SpeculationParams(drafter="self", method="static", nodes=20)


def _model() -> PreTrainedModel:
    model = tiny()
    assert model.generation_config is not None
    model.generation_config.pad_token_id = 0
    return model


def _generate(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **options: object) -> list[list[int]]:
    out: list[list[int]] = cast(Any, model).generate(ids, attention_mask=mask, **options).tolist()
    return out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.4},
        {"min_new_tokens": 10, "eos_token_id": [5, 9, 14]},
        {"eos_token_id": 9},
        {"no_repeat_ngram_size": 2},
    ],
)
def test_greedy_generate_gives_the_same_ids(options: dict[str, object]) -> None:
    model = _model()
    want = _generate(model, PROMPT, FULL, do_sample=False, max_new_tokens=30, **options)
    ours = draftree.custom_generate(TREES)
    assert _generate(model, PROMPT, FULL, do_sample=False, max_new_tokens=30, custom_generate=ours, **options) == want


def test_where_the_context_has_less_room_the_text_ends_there() -> None:
    """transformers only warns; this was refused, and one long row of a batch ended them all."""
    model = _model()
    context = int(model.config.max_position_embeddings)
    prompt = torch.tensor([[3 + i % 20 for i in range(context - 5)]])
    ours = _generate(
        model,
        prompt,
        torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=20,
        custom_generate=draftree.custom_generate(draftree.SpeculationParams(drafter="lookup")),
    )
    assert len(ours[0]) == context


def test_inputs_beside_ids_are_refused_by_name() -> None:
    """A prompt of embeddings was said to be empty; one of ids and pixels would have been read without the pixels."""
    model = _model()
    embeddings = model.get_input_embeddings()(PROMPT)
    for inputs in ({"inputs_embeds": embeddings}, {"input_ids": PROMPT, "inputs_embeds": embeddings}):
        with pytest.raises(ConfigError, match="inputs_embeds are given"):
            cast(Any, model).generate(**inputs, max_new_tokens=4, custom_generate=draftree.generate_with)


def test_left_padded_batches_come_back_padded_as_generate_pads_them() -> None:
    model = _model()
    options = {"do_sample": False, "max_new_tokens": 25, "eos_token_id": 9, "repetition_penalty": 1.2}
    want = _generate(model, PADDED, SEEN, **options)
    assert _generate(model, PADDED, SEEN, custom_generate=draftree.generate_with, **options) == want


def test_each_row_of_a_batch_is_held_to_its_own_prefixes() -> None:
    """The function was asked for the other rows too, with this row's text, and what is no prefix there ended all."""

    def allowed(row: int, text: torch.Tensor) -> list[int]:
        own = text[: PADDED.shape[1]].tolist() == PADDED[row].tolist()
        return [token for token in range(VOCAB) if (token + len(text)) % (row + 2) == 0] if own else []

    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
    free = _generate(_model(), PADDED, SEEN, **options)
    options["prefix_allowed_tokens_fn"] = allowed
    want = _generate(_model(), PADDED, SEEN, **options)
    for speculation in (None, TREES):
        ours = draftree.custom_generate(speculation)
        assert _generate(_model(), PADDED, SEEN, custom_generate=ours, **options) == want != free


@pytest.mark.parametrize("place", range(1, 7))
def test_no_prefix_is_asked_for_behind_the_end_of_a_text(place: int) -> None:
    """A draft that went on behind the end asked for one, and there is none."""
    free = _generate(_model(), PROMPT, FULL, do_sample=False, max_new_tokens=12)[0]
    end = free[PROMPT.shape[1] + place]

    def allowed(row: int, text: torch.Tensor) -> list[int]:
        return [] if end in text[PROMPT.shape[1] :] else [*range(VOCAB)]

    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": end}
    options["prefix_allowed_tokens_fn"] = allowed
    want = _generate(_model(), PROMPT, FULL, **options)
    assert want[0] == free[: len(want[0])] and want[0][-1] == end
    ours = draftree.custom_generate(TREES)
    assert _generate(_model(), PROMPT, FULL, custom_generate=ours, **options) == want


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    ("options", "processor"),
    [
        ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidance"),
        ({"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[7, 8, 9]])}, "UnbatchedClassifierFreeGuidance"),
        ({"watermarking_config": SynthIDTextWatermarkingConfig(3, [654, 400, 836, 123])}, "SynthIDTextWatermark"),
    ],
)
def test_what_keeps_the_state_of_a_text_takes_one(options: dict[str, Any], processor: str, drafted: bool) -> None:
    """Each row of a batch added its tokens to the others' state."""
    given = {"do_sample": False, "max_new_tokens": 20, **options}
    plain = _generate(_model(), PROMPT, FULL, do_sample=False, max_new_tokens=20)
    want = _generate(_model(), PROMPT, FULL, **given)
    ours = draftree.custom_generate(TREES if drafted else draftree.SpeculationParams(drafter="none"))
    assert want != plain and _generate(_model(), PROMPT, FULL, custom_generate=ours, **given) == want
    with pytest.raises(ConfigError, match=f"{processor}.* 3:"):
        _generate(_model(), PADDED, SEEN, custom_generate=ours, **given)


def test_sampling_follows_the_seed_and_the_config() -> None:
    model = _model()
    options = {"do_sample": True, "temperature": 0.8, "top_k": 7, "top_p": 0.9, "max_new_tokens": 30}

    def sample(seed: int | None, drafter: str) -> list[list[int]]:
        ours = draftree.custom_generate(draftree.SpeculationParams(drafter=drafter, method="dynamic-width"), seed=seed)
        return _generate(model, PROMPT, FULL, custom_generate=ours, **options)

    assert sample(3, "self") == sample(3, "none")
    assert sample(3, "none") != sample(4, "none")
    assert sample(None, "none") != sample(None, "none")


def test_the_models_attention_is_left_as_it_was() -> None:
    model = _model()
    before = model.config._attn_implementation
    _generate(model, PROMPT, FULL, do_sample=False, max_new_tokens=3, custom_generate=draftree.generate_with)
    assert model.config._attn_implementation == before


def test_settings_can_be_given_to_generate_itself() -> None:
    model = _model()
    want = _generate(model, PROMPT, FULL, do_sample=False, max_new_tokens=20)
    speculation = draftree.SpeculationParams(drafter="self", method="chain", settings={"depth": 2}, nodes=5)
    got = _generate(
        model,
        PROMPT,
        FULL,
        do_sample=False,
        max_new_tokens=20,
        custom_generate=draftree.generate_with,
        speculation=speculation,
    )
    assert got == want


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"return_dict_in_generate": True}])
def test_what_it_cannot_do_is_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        _generate(_model(), PROMPT, FULL, max_new_tokens=3, custom_generate=draftree.generate_with, **options)


@pytest.mark.parametrize("chosen", [None, draftree.SpeculationParams(drafter="lookup")])
def test_one_callable_serves_several_models(chosen: draftree.SpeculationParams | None) -> None:
    """The second model was refused: the policy had learned for the first."""
    ours, options = draftree.custom_generate(chosen), {"do_sample": False, "max_new_tokens": 9, "pad_token_id": 0}
    for kind in ("llama", "gpt2"):
        want = _generate(tiny(kind), PROMPT, FULL, **options)
        assert _generate(tiny(kind), PROMPT, FULL, custom_generate=ours, **options) == want


def test_a_verification_is_chosen_by_name_and_refused_before_anything_is_loaded() -> None:
    ours = draftree.custom_generate(
        draftree.SpeculationParams(drafter="self", method="chain", verification="multi-round"), seed=3
    )
    options = {"do_sample": True, "max_new_tokens": 20, "custom_generate": ours}
    assert _generate(_model(), PROMPT, FULL, **options) == _generate(_model(), PROMPT, FULL, **options)
    want = _generate(_model(), PROMPT, FULL, do_sample=False, max_new_tokens=20)
    assert _generate(_model(), PROMPT, FULL, do_sample=False, max_new_tokens=20, custom_generate=ours) == want
    with pytest.raises(ConfigError, match="multi-round"):
        draftree.custom_generate(
            draftree.SpeculationParams(drafter="./never-loaded", method="opt-tree", verification="multi-round")
        )


def test_a_drafting_model_is_loaded_by_name_and_checked(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "drafter", seed=4)
    model = _model()
    want = _generate(model, PROMPT, FULL, do_sample=False, max_new_tokens=20)
    ours = draftree.custom_generate(draftree.SpeculationParams(drafter=str(folder)))
    assert _generate(model, PROMPT, FULL, do_sample=False, max_new_tokens=20, custom_generate=ours) == want


def test_a_draft_head_drafts_by_its_folder(tmp_path: Path) -> None:
    model = _model()
    want = _generate(model, PROMPT, FULL, do_sample=False, max_new_tokens=20)
    target = HFModel(tiny(), self_test=False)
    save_head(tmp_path, random_network(target), DRAFTED, target)
    ours = draftree.custom_generate(draftree.SpeculationParams(drafter=str(tmp_path), method="opt-tree", nodes=8))
    for _ in range(2):
        assert _generate(model, PROMPT, FULL, do_sample=False, max_new_tokens=20, custom_generate=ours) == want
