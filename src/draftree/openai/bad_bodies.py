"""What is wrong with a body: fields that are refused by name, and errors in OpenAI's shape. Knows no HTTP."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..config import way_out
from ..errors import ChatTemplateError, ContextError, FieldError, InputError, shortened

INVALID, MISSING = "invalid_request_error", "not_found_error"
"""Types of errors."""

log = logging.getLogger("draftree.openai")

NOT_JSON = "the body is no JSON object: send one, as application/json"

_NOTHING: Sequence[object] = (0, "", [], {})  # 0 is False, and 1 is True
_NEUTRAL: Mapping[str, Sequence[object]] = {
    name: (None, *neutral)
    for names, neutral in (
        (
            "adapter_id audio chat_format context conversation custom_logit_processor custom_params documents "
            "ebnf enable_thinking grammar_triggers guided_choice guided_grammar "
            "guided_json guided_regex guided_whitespace_pattern image_data input input_extra input_ids input_prefix "
            "input_suffix instructions json_schema logits_processors logit_processors lora_path max_completion_tokens "
            "max_length max_new_tokens max_output_tokens messages min_length models moderation "
            "negative_prompt penalty_prompt prediction prompt prompt_embeds prompt_logprobs random_seed "
            "reasoning_budget regex refusal response_fields sampler_seq samplers sampling_seed session_params "
            "speculative stop_regex stop_sequences structural_tag system t_max_predict_ms t_max_prompt_ms template "
            "text thinking thinking_budget thinking_token_budget top_logprobs truncate_prompt_tokens vllm_xargs "
            "web_search_options",
            (),
        ),
        (
            "adaptive_target ban_eos_token chat_template chat_template_kwargs continue_final_message dry_multiplier "
            "dynamic_temperature dynatemp_range early_stopping echo epsilon_cutoff eta_cutoff format functions grammar "
            "grammar_lazy images lora min_keep min_new_tokens mirostat mirostat_mode mm_processor_kwargs n_discard "
            "n_indent n_probs no_repeat_ngram_size no_stop_trim options penalty_alpha post_sampling_probs "
            "return_full_text return_token_ids return_tokens return_tokens_as_token_ids safe_prompt smoothing_factor "
            "suffix tools top_a transforms use_beam_search watermark xtc_probability",
            _NOTHING,
        ),
        (
            "add_bos_token add_generation_prompt add_special_tokens best_of cfg_scale detokenize do_sample "
            "encoder_repetition_penalty guidance_scale length_penalty num_beams num_return_sequences rep_pen "
            "repeat_penalty spaces_between_special_tokens tfs tfs_z typ_p typical typical_p",
            (1,),
        ),
        ("repeat_last_n n_predict top_n_sigma", (-1,)),
        ("function_call tool_choice", ("none", "auto")),
        ("modalities", (["text"],)),
        ("response_format", ({"type": "text"},)),
        ("truncation_side", ("left",)),
    )
    for name in names.split()
}
"""Fields of OpenAI, vLLM, llama.cpp and others that would change an answer -> the values that change nothing."""

_WISHES: Mapping[str, tuple[Sequence[object], str]] = {
    "context_management": ((None, []), "no conversation is compacted here"),
    "reasoning": ((None, {}, {"effort": None}, {"effort": "none"}), "how a model reasons is not set here"),
    "reasoning_effort": ((None, "none"), "how a model reasons is not set here"),
    "store": ((None, False), "no answer is stored here"),
    "truncation": ((None, "disabled"), "a conversation that does not fit the context is refused"),
    "verbosity": ((None, "medium"), "how long a model's answers are is not set here"),
}
"""Fields without which the text means the same -> the values that wish for nothing, and what the log says of others."""

_MOST_OBJECTS = 1 << 14
"""Messages, their parts, calls and all else that is an object or a list: each takes some 20 us to be read."""
_MOST_FIELDS = 1 << 10
_NESTED = (dict, list)


class UnsupportedError(FieldError):
    """A field that would change the answer, and is not supported."""

    def __init__(self, field: str, way_out: str = "leave it out") -> None:
        super().__init__(field, f"{field} is not supported here: {way_out}")


class UnknownModelError(FieldError):
    """The model is another one."""


def check_model(asked: str, there: str) -> None:
    """Raise UnknownModelError unless a model is the one that is there."""
    if asked != there:
        raise UnknownModelError("model", f"no model {asked!r}: there is {there!r}")


def check_extra(extra: Mapping[str, object]) -> None:
    """Refuse what a body has beside its fields and would change the answer; what is wished for is left out.

    Raises:
        UnsupportedError: of the first such field.
    """
    for name, value in extra.items():
        if name in _WISHES:
            nothing, why = _WISHES[name]
            if value not in nothing:
                left_out(name, why)
        elif (neutral := _NEUTRAL.get(name.partition(".")[0])) is not None and value not in neutral:
            raise UnsupportedError(name)


@lru_cache(maxsize=1 << 10)
def left_out(what: str, why: str) -> None:
    """Log what requests have and no answer needs, once for each kind."""
    log.warning("%s", shortened(f"{what} of requests is left out: {why}"))


def check_values(body: object) -> object:
    """The body, if an answer could repeat all that it has.

    Raises:
        FieldError: a number is none (NaN, Infinity), or a text has half a character, or is nested too deep, or it has
            more objects, lists or fields than can be read while others wait.
    """
    if isinstance(body, dict) and len(body) > _MOST_FIELDS:
        raise FieldError([*body][_MOST_FIELDS], f"the body has {len(body)} fields: send at most {_MOST_FIELDS}")
    for name, value in body.items() if isinstance(body, dict) else ():
        if _objects(value) > _MOST_OBJECTS:
            raise FieldError(name, f"{name} has more than {_MOST_OBJECTS} objects and lists: send fewer")
        try:
            json.dumps({name: value}, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            named = _whole(name)
            why = f"{named} is no JSON in UTF-8 ({error}): send whole characters and finite numbers"
            raise FieldError(named, why) from None
    return body


def _objects(value: object) -> int:
    """Objects and lists inside it; no more are counted than may be there."""
    found, left = 0, [value]
    while left and found <= _MOST_OBJECTS:
        if isinstance(inner := left.pop(), _NESTED):
            found += 1
            left += [each for each in (inner.values() if isinstance(inner, dict) else inner) if type(each) in _NESTED]
    return found


def error(message: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    where = None if field is None else _whole(field)
    return {"error": {"message": _whole(message), "type": kind, "param": where, "code": code}}


def _whole(text: str) -> str:
    """Text with escapes in place of halves of characters, which cannot be sent."""
    return text.encode(errors="backslashreplace").decode()


def failure(found: Exception, prefix: str = "") -> tuple[int, dict[str, Any]]:
    """Status and body of a request that was not answered; ``prefix`` begins the message."""
    if not isinstance(found, InputError):
        why = shortened(f"{prefix}{type(found).__name__}: {' '.join(str(found).split())}")
        return 500, error(why, "server_error")
    if not isinstance(found, FieldError):
        return 400, error(f"{prefix}{found}", INVALID)
    code = next((word for kind, word in _WORDS.items() if isinstance(found, kind)), "invalid_value")
    message = str(found) if found.field in str(found) else f"{found.field}: {found}"
    if isinstance(found, ChatTemplateError):
        message += " (/v1/completions continues texts; who serves the model gives it a template by --chat-template)"
    status, kind = (404, MISSING) if isinstance(found, UnknownModelError) else (400, INVALID)
    return status, error(prefix + message, kind, found.field, code)


_WORDS = {
    ContextError: "context_length_exceeded",
    UnknownModelError: "model_not_found",
    UnsupportedError: "unsupported_parameter",
}


def body_error(errors: Sequence[Any], sent: object, prefix: str = "") -> dict[str, Any]:
    """Of a body that is not what it should be: what is wrong with the first field that is.

    Args:
        errors: as pydantic lists them; of a union there is one for each of its types, of which the deepest counts.
        sent: the body.
    """
    first = errors[0]["loc"][:1]
    placed = [(tuple(_place(each, sent)), each) for each in errors if each["loc"][:1] == first]
    place = max((at for at, _ in placed), key=len)
    here = [each for at, each in placed if at == place]
    found = next((each for each in here if each["type"] == "value_error"), here[0])
    name = re.sub(r"\.(?=\[)", "", ".".join(place))
    if isinstance(inner := found.get("ctx", {}).get("error"), FieldError):
        inner.rename(f"{name}.{inner.field}".lstrip("."))
        return failure(inner, prefix)[1]
    if not place:
        return error(f"{prefix}{NOT_JSON}", INVALID)
    if found["type"] == "missing":
        return error(f"{prefix}{name} is missing: add it", INVALID, name, "missing_required_parameter")
    value = json.dumps(found["input"]) if isinstance(found["input"], (str, int, float)) else "wrong"
    what = ", or ".join(dict.fromkeys(way_out(each) for each in here))
    code = "invalid_type" if found["type"].endswith("_type") else "invalid_value"
    return error(prefix + shortened(f"{name} is {value}: {what}"), INVALID, name, code)


def _place(found: Mapping[str, Any], sent: object) -> Iterator[str]:
    """Where something is in a body, without pydantic's names of the types of a union; a key is in its object."""
    parts = found["loc"][: -2 if found["loc"][-1:] == ("[key]",) else None]
    for part in parts:
        if (isinstance(sent, list) and isinstance(part, int)) or (isinstance(sent, dict) and part in sent):
            yield f"[{part}]" if isinstance(sent, list) else str(part)
            sent = sent[part]
    if found["type"] == "missing" and found["loc"]:
        yield str(found["loc"][-1])
