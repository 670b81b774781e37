"""llama.cpp's shared library, through ctypes: where it is found, its structs, and the functions that are called.

The package ``xllamacpp`` brings it. It exports the C functions without promising them: its version is pinned, and the
defaults that the library fills into our structs are compared with the known ones before anything else is called.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from ctypes import CFUNCTYPE, c_bool, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import ConfigError

XLLAMACPP = "2026.10.11549"
"""The version of xllamacpp whose structs are declared here (llama.cpp b11549)."""
_BUILD = XLLAMACPP.split(".")[-1]

F16, Q8_0, BF16 = 1, 8, 30
"""ggml's numbers of the types of keys and values."""


class BatchStruct(ctypes.Structure):
    """llama_batch, the same for years: tokens of one pass."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    ]


class ModelParams(ctypes.Structure):
    """llama_model_params of b11549."""

    _fields_ = [
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    ]


class ContextParams(ctypes.Structure):
    """llama_context_params of b11549."""

    _fields_ = [
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int),
        ("rope_scaling_type", c_int),
        ("pooling_type", c_int),
        ("attention_type", c_int),
        ("flash_attn_type", c_int),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int),
        ("type_v", c_int),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    ]


_DEFAULTS: dict[str, float] = {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "flash_attn_type": -1}
_DEFAULTS |= {"yarn_ext_factor": -1.0, "defrag_thold": -1.0, "type_k": F16, "type_v": F16, "embeddings": False}
_DEFAULTS |= {"offload_kqv": True}
"""Of ``llama_context_default_params``, spread over the struct: another layout shows in one of them."""


_Log = CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_ERROR = 4
"""ggml's log level of errors."""

_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "backend_init": (None, ()),
    "supports_gpu_offload": (c_bool, ()),
    "log_set": (None, (_Log, c_void_p)),
    "model_free": (None, (c_void_p,)),
    "model_get_vocab": (c_void_p, (c_void_p,)),
    "model_n_ctx_train": (c_int32, (c_void_p,)),
    "model_n_params": (c_uint64, (c_void_p,)),
    "model_n_swa": (c_int32, (c_void_p,)),
    "model_has_encoder": (c_bool, (c_void_p,)),
    "model_has_decoder": (c_bool, (c_void_p,)),
    "model_is_recurrent": (c_bool, (c_void_p,)),
    "model_is_hybrid": (c_bool, (c_void_p,)),
    "free": (None, (c_void_p,)),
    "get_memory": (c_void_p, (c_void_p,)),
    "n_ctx": (c_uint32, (c_void_p,)),
    "get_logits": (c_void_p, (c_void_p,)),
    "memory_clear": (None, (c_void_p, c_bool)),
    "memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "memory_seq_cp": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "state_get_size": (c_size_t, (c_void_p,)),
    "state_get_data": (c_size_t, (c_void_p, c_void_p, c_size_t)),
    "state_set_data": (c_size_t, (c_void_p, c_void_p, c_size_t)),
    "vocab_type": (c_int, (c_void_p,)),
    "vocab_n_tokens": (c_int32, (c_void_p,)),
    "vocab_get_attr": (c_int, (c_void_p, c_int32)),
    "vocab_is_eog": (c_bool, (c_void_p, c_int32)),
    "vocab_get_text": (c_char_p, (c_void_p, c_int32)),
    "vocab_bos": (c_int32, (c_void_p,)),
    "vocab_eos": (c_int32, (c_void_p,)),
    "tokenize": (c_int32, (c_void_p, c_char_p, c_int32, c_void_p, c_int32, c_bool, c_bool)),
    "token_to_piece": (c_int32, (c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool)),
    "model_default_params": (ModelParams, ()),
    "context_default_params": (ContextParams, ()),
    "model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "decode": (c_int32, (c_void_p, BatchStruct)),
}
"""Name without ``llama_`` -> its result and arguments."""


class Library:
    """A loaded library: its functions are attributes, by their names without ``llama_``.

    Attributes:
        name: what it is and where it came from, for people.
        complaints: what it has said about errors since they were last cleared.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name, self.complaints = name, list[str]()
        try:
            library = ctypes.CDLL(str(path))
            for short, (result, arguments) in _FUNCTIONS.items():
                function = getattr(library, f"llama_{short}")
                function.restype, function.argtypes = result, arguments
                setattr(self, short, function)
        except (OSError, AttributeError) as error:
            raise ConfigError(f"{name} is no library of llama.cpp that can be used: {error}: {_WAY_OUT}") from None
        found = self.context_default_params()
        if wrong := [f"{field} {now}" for field, value in _DEFAULTS.items() if (now := getattr(found, field)) != value]:
            raise ConfigError(f"{name} is of another version than b{_BUILD} ({', '.join(wrong)}): {_WAY_OUT}")
        self._log = _Log(self._hear)
        self.log_set(self._log, None)
        self.backend_init()

    def __getattr__(self, name: str) -> Any:
        """The functions are set by name: for type checkers."""
        raise AttributeError(name)

    def _hear(self, level: int, text: bytes, data: object) -> None:
        if level == _ERROR:
            self.complaints.append(text.decode(errors="replace").strip())

    def complaint(self) -> str:
        """The last error that it has reported, in one line; "": none. It is forgotten."""
        said, self.complaints = self.complaints, []
        return said[-1] if said else ""


_WAY_OUT = f"pip install xllamacpp=={XLLAMACPP}, or use backend 'transformers'"


def has_library() -> bool:
    """The package that brings the library is installed."""
    return importlib.util.find_spec("xllamacpp") is not None


@cache
def open_library() -> Library:
    """The library of llama.cpp.

    Raises:
        ConfigError: there is none, or none of the version whose structs are known.
    """
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise ConfigError(f"GGUF files need llama.cpp: {_WAY_OUT}")
    version = importlib.metadata.version("xllamacpp")
    if version != XLLAMACPP:
        raise ConfigError(f"xllamacpp is {version}, but only {XLLAMACPP} is supported: {_WAY_OUT}")
    found = sorted(Path(spec.origin).parent.glob("xllamacpp*.so"))
    if not found:
        raise ConfigError(f"xllamacpp in {Path(spec.origin).parent} has no library for this system: {_WAY_OUT}")
    return Library(found[0], f"xllamacpp {version}")
