"""Tiny random Hugging Face models and a tiny tokenizer, built on the spot: no download, the same for the same seed.

Weights are drawn wide (standard deviation 0.3), so that logits are far from flat: a mask that leaks one token, or a
position that is off by one, moves them by tenths and not by rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3NextForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from draftree.text.encoding import CALL_TAGS

from . import families

torch.set_num_threads(1)
"""Models this small are several times slower on more threads, above all on a busy machine."""

VOCAB, BYTES_VOCAB = 61, 288
MAX_LENGTH = 128
WINDOW = 8

_STD = 0.3
_IDS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SIZES: dict[str, Any] = {
    **_IDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LENGTH,
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}
_SLIDES: dict[str, Any] = {**_GROUPED, "sliding_window": WINDOW}
_ALTERNATES: dict[str, Any] = {**_SLIDES, "layer_types": ["sliding_attention", "full_attention"]}
_GLOBAL: dict[str, Any] = {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1}
"""Heads of Gemma 4, whose layers without a window have other ones."""
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "position_embedding_size": 16,
}
_PLACES: dict[str, Any] = dict.fromkeys(("image_token_id", "video_token_id", "audio_token_id"), VOCAB)
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


def _config(family: str) -> Any:
    return families.FAMILIES[family].configuration()


_BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_GROUPED)),
    "llama_bytes": lambda: LlamaForCausalLM(
        LlamaConfig(**{**_GROUPED, "vocab_size": BYTES_VOCAB, "max_position_embeddings": 8 * MAX_LENGTH})
    ),
    "llama_mha": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, num_key_value_heads=4)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_GROUPED)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**_IDS, n_embd=32, n_layer=2, n_head=4, n_positions=MAX_LENGTH)),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            **_IDS,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=MAX_LENGTH,
        )
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_GROUPED, sliding_window=None)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**_GROUPED, head_dim=8)),
    "mistral_window": lambda: MistralForCausalLM(MistralConfig(**_SLIDES)),
    "phi3_window": lambda: Phi3ForCausalLM(Phi3Config(**_SLIDES)),
    "qwen2_window": lambda: Qwen2ForCausalLM(Qwen2Config(**_SLIDES, use_sliding_window=True, max_window_layers=1)),
    "gemma3_window": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**_ALTERNATES, head_dim=8)),
    "gemma4_window": lambda: Gemma4ForCausalLM(
        Gemma4TextConfig(**_ALTERNATES, **_GLOBAL, hidden_size_per_layer_input=0)
    ),
    "gemma4_shared_window": lambda: Gemma4ForCausalLM(
        Gemma4TextConfig(
            **{**_ALTERNATES, **_GLOBAL, "num_hidden_layers": 4, "layer_types": 2 * _ALTERNATES["layer_types"]},
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB,
        )
    ),
    "gemma4_images_window": lambda: Gemma4ForConditionalGeneration(
        Gemma4Config(
            text_config=Gemma4TextConfig(**_ALTERNATES | _GLOBAL | {"pad_token_id": 0}, hidden_size_per_layer_input=0),
            vision_config=_VISION,
            **_PLACES,
        )
    ),
    "gpt_oss_window": lambda: GptOssForCausalLM(
        GptOssConfig(**_ALTERNATES, head_dim=8, num_local_experts=4, num_experts_per_tok=2, rope_parameters=_ROPE)
    ),
    "afmoe_window": lambda: AfmoeForCausalLM(
        AfmoeConfig(
            **_ALTERNATES,
            head_dim=8,
            num_dense_layers=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        )
    ),
    "cohere2_window": lambda: Cohere2ForCausalLM(Cohere2Config(**_ALTERNATES, logit_scale=1.0)),
    "bloom": lambda: BloomForCausalLM(BloomConfig(**_IDS, hidden_size=32, n_layer=2, n_head=4)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    ),
    "gpt_neo": lambda: GPTNeoForCausalLM(
        GPTNeoConfig(
            **_IDS,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=WINDOW,
            max_position_embeddings=MAX_LENGTH,
        )
    ),
    "openai_gpt": lambda: OpenAIGPTLMHeadModel(
        OpenAIGPTConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=MAX_LENGTH)
    ),
    "roberta": lambda: RobertaForCausalLM(RobertaConfig(**{**_SIZES, "pad_token_id": 1}, is_decoder=True)),
    "mamba": lambda: MambaForCausalLM(MambaConfig(**_IDS, hidden_size=32, state_size=4, num_hidden_layers=2)),
    "mamba2": lambda: Mamba2ForCausalLM(
        Mamba2Config(**_IDS, hidden_size=32, num_heads=8, head_dim=8, state_size=8, n_groups=1, num_hidden_layers=2)
    ),
    "qwen3_5": lambda: Qwen3_5ForCausalLM(_config("qwen35")),
    "qwen3_next": lambda: Qwen3NextForCausalLM(_config("qwen3next")),
}

FAMILIES = ("llama", "llama_mha", "qwen2", "gpt2", "opt", "gpt_neox", "mistral", "gemma")
"""Families that take draft trees."""
WINDOWED = (
    *("mistral_window", "phi3_window", "qwen2_window", "gemma3_window", "gemma4_window", "gemma4_shared_window"),
    *("gemma4_images_window", "gpt_oss_window", "afmoe_window", "cohere2_window"),
)
"""Families of which all layers (the first two), or every other one, attend to ``WINDOW`` tokens."""


def tiny(kind: str = "llama", seed: int = 0, attention: str | None = None) -> PreTrainedModel:
    """A tiny random model of a family, without end-of-request token; the global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _BUILDERS[kind]()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.normal_(std=_STD)
                else:  # norms and biases: away from ones and zeros, so that each of them matters
                    weight.add_(torch.randn_like(weight), alpha=_STD / 3)
    if attention:
        model.set_attn_implementation(attention)
    model.eval()
    return model


@torch.inference_mode()
def causal_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """[len(ids), V] logits of one causal forward without a cache."""
    logits: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


_CHARACTERS = "abcdefghijklmnopqrstuvwxyzé0123456789 \n.,!?'\":-"
_MERGES = ["t h", "th e", "i n", "a n", "Ġ a", "Ġ the", "e r", "o n", "r e", "i s"]
_SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tiny_tokenizer(shift: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of ``VOCAB`` tokens with a chat template: lower case, digits, punctuation and é.

    Lower-case text round-trips; é is two tokens, neither of which is a character; anything else is <unk>.

    Args:
        shift: the token of "-" is "_".
    """
    characters = _CHARACTERS.replace("-", "_") if shift else _CHARACTERS
    spelt = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(characters)[0][0]
    tokens = [*_SPECIAL.values(), *spelt, *(m.replace(" ", "") for m in _MERGES)]
    merges = [(left, right) for left, right in (m.split() for m in _MERGES)]
    backend = Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, merges, unk_token=_SPECIAL["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=_TEMPLATE, clean_up_tokenization_spaces=False, **_SPECIAL
    )


_JSON_MERGES = ['{ "', '" :', '": Ġ', '": Ġ{', '": Ġ"', '" ,', "} }", "} Ċ", "}} Ċ", "> Ċ", "t h", "th e", "Ġ {", 'Ġ "']


def bytes_tokenizer(tags: bool | None = None, template: str = _TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most ``BYTES_VOCAB`` tokens: all bytes, and what JSON has beside one another.

    Args:
        tags: the tags of calls are tokens, special ones if true; None: they are text.
    """
    merges = [(left, right) for left, right in (m.split() for m in _JSON_MERGES)]
    tokens = [*_SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += dict.fromkeys(left + right for left, right in merges)
    backend = Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, merges, unk_token=_SPECIAL["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, clean_up_tokenization_spaces=False, **_SPECIAL
    )
    if tags is not None:
        tokenizer.add_tokens([AddedToken(tag, special=tags, normalized=False) for tag in CALL_TAGS])
    return tokenizer


def save_tiny(folder: Path, kind: str = "llama", vocab_shift: bool = False, seed: int = 0) -> Path:
    """Save a tiny model and its tokenizer, whose </s> ends requests, into ``folder`` as ``draftree.load`` takes them.

    Args:
        vocab_shift: one token of the tokenizer differs (``tiny_tokenizer``).
    """
    model, tokenizer = tiny(kind, seed), tiny_tokenizer(vocab_shift)
    model.config.eos_token_id = tokenizer.eos_token_id
    if model.generation_config is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_gguf(path: Path, lacking: Sequence[str] = (), seed: int = 0) -> Path:
    """Save a tiny Llama model and its tokenizer as a GGUF file, without the tensors ``lacking`` (GGUF names)."""
    model, tokenizer = tiny(seed=seed), tiny_tokenizer()
    config, names = model.config, gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(_SPECIAL) + [gguf.TokenType.NORMAL] * (VOCAB - len(_SPECIAL)))
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    for weight, value in model.state_dict().items():
        tensor = names.get_name(weight, try_suffixes=(".weight",))
        if "q_proj" in weight or "k_proj" in weight:  # GGUF has the two halves that rotary embeddings turn interleaved
            halves = value.unflatten(0, (-1, 2, config.head_dim // 2))
            value = halves.transpose(1, 2).flatten(0, 2).contiguous()
        if tensor not in lacking:
            writer.add_tensor(str(tensor), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
