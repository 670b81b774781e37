"""llama.cpp through ctypes: its shared library, and weights as an object that frees itself.

The package ``xllamacpp`` brings the library. It exports the C functions without promising them: its version is pinned.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
from ctypes import CFUNCTYPE, c_bool, c_char, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any
from weakref import finalize

from gguf.constants import Keys

from ...errors import ConfigError, DraftreeError, ModelFileError, UnsupportedModelError
from ...installation import install_command
from ...progress import StoppableProgress, loading_reporter
from ..gguf.gguf_checks import check_header, check_weights
from ..gguf.gguf_file import GGUFHeader
from ..gguf.metadata import AGAIN
from ..memory import check_fits

XLLAMACPP = "2026.10.11549"
"""The version of xllamacpp whose structs are declared here (llama.cpp b11549)."""

F16, Q8_0, BF16 = 1, 8, 30
"""ggml's numbers of the types of keys and values."""


class BatchStruct(ctypes.Structure):
    """llama_batch, the same for years: tokens of one pass."""

    _fields_ = [
        ("n_tokens", c_int32),
        *((name, c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    ]


class ModelParams(ctypes.Structure):
    """llama_model_params of b11549; names with an underscore are of several fields that nothing here changes."""

    _fields_ = [
        ("_from_devices", c_void_p * 6),
        ("progress_callback", c_void_p),
        ("_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("_flags", c_bool * 5),
    ]


class OverrideStruct(ctypes.Structure):
    """llama_model_kv_override: a whole number instead of the file's; an empty key ends an array of them."""

    _fields_ = [("kind", c_int), ("key", c_char * 128), ("number", c_int64), ("_rest", c_char * 120)]


class ContextParams(ctypes.Structure):
    """llama_context_params of b11549, as ``ModelParams``."""

    _fields_ = [
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("_outputs", c_uint32 * 3),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("_kinds", c_int * 4),
        ("flash_attn_type", c_int),
        ("_positions", c_float * 6),
        ("_trained", c_uint32),
        ("_defragmenting", c_float),
        ("_callback", c_void_p * 2),
        ("type_k", c_int),
        ("type_v", c_int),
        ("_abort", c_void_p * 3),
        ("_flags", c_bool * 4),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("_rest", c_void_p * 3),
    ]


Log = CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_ERROR = 4
"""ggml's log level of errors."""
_Progress = CFUNCTYPE(c_bool, c_float)
"""llama_progress_callback; the pointer that it gets as well is not read."""

_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "backend_init": (None, ()),
    "supports_gpu_offload": (c_bool, ()),
    "log_set": (None, (Log, c_void_p)),
    "model_free": (None, (c_void_p,)),
    "model_get_vocab": (c_void_p, (c_void_p,)),
    "model_n_ctx_train": (c_int32, (c_void_p,)),
    **dict.fromkeys(
        ("model_has_encoder", "model_has_decoder", "model_is_recurrent", "model_is_hybrid"), (c_bool, (c_void_p,))
    ),
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
    "state_seq_get_size": (c_size_t, (c_void_p, c_int32)),
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
        self._log = Log(self._hear)
        self.listen()
        self.backend_init()

    def __getattr__(self, name: str) -> Any:
        """The functions are set by name: for type checkers."""
        raise AttributeError(name)

    def _hear(self, level: int, text: bytes, data: object) -> None:
        if level == _ERROR:
            self.complaints.append(text.decode(errors="replace").strip())

    def listen(self) -> None:
        """Forget what it has reported, and hear what it will: another user of it in this process (the server of
        xllamacpp) may have taken its reports."""
        self.log_set(self._log, None)
        self.complaints = []

    def complaint(self) -> str:
        """The first error that it has reported, for those behind it only say that it failed. All are forgotten."""
        said, self.complaints = self.complaints, []
        return said[0] if said else "it gives no reason"


_WAY_OUT = f"{install_command(f'xllamacpp=={XLLAMACPP}')}, or use backend 'transformers'"


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
    libraries = sorted(Path(spec.origin).parent.glob("xllamacpp*.so"))
    if not libraries:
        raise ConfigError(f"xllamacpp in {Path(spec.origin).parent} has no library for this system: {_WAY_OUT}")
    return Library(libraries[0], f"xllamacpp {version}")


_BLOCK = 32
"""Values of a block of Q8_0."""
_LONG_ROPE = "rope_factors_long.weight"
"""Factors of rope frequencies for texts that are longer than those that a model was first trained on."""


class Weights:
    """A model that is loaded.

    Attributes:
        header: of the file.
        pointer: llama.cpp's.
        vocab: pointer to its vocabulary.
        vocab_size: V.
        types: ggml's numbers of those of keys and of values.
        recurrent: it keeps a state of each sequence that was computed from all its tokens, alone or beside keys and
            values: it can be copied, but not cut.

    Raises:
        ModelFileError: the file cannot be loaded.
        RunError: it does not fit into the free memory.
        UnsupportedModelError: it holds an encoder.
    """

    def __init__(self, library: Library, path: Path) -> None:
        self.library, self.header = library, check_header(path)
        check_fits(path, size := self.header.weight_bytes)
        with loading_reporter(path, size) as report:
            check_weights(self.header, lambda done: report(done / 2))
            stoppable = StoppableProgress(lambda done: report((1 + done) / 2))
            params, callback = library.model_default_params(), _Progress(stoppable.report)
            params.progress_callback = ctypes.cast(callback, c_void_p)
            overrides = self._overrides()
            params.kv_overrides = ctypes.addressof(overrides)
            library.listen()
            self.pointer = library.model_load_from_file(os.fsencode(path), params)
        stoppable.check()
        if not self.pointer:
            raise unloadable(library, path)
        finalize(self, library.model_free, self.pointer)
        check_decoder(library, self.pointer, self.header)
        self.recurrent = bool(library.model_is_recurrent(self.pointer) or library.model_is_hybrid(self.pointer))
        self.vocab = library.model_get_vocab(self.pointer)
        self.vocab_size: int = library.vocab_n_tokens(self.vocab)
        self.types = self._types()

    def _overrides(self) -> ctypes.Array[OverrideStruct]:
        """Numbers that llama.cpp takes for the file's.

        It chooses between the two sets of factors of LongRoPE by the size of a context, which grows here with keys in
        it that were rotated by the other set. They are chosen by the model's longest text, as in the native engine.
        """
        metadata, overrides = self.header.metadata, (OverrideStruct * 2)()
        longest = metadata.number(Keys.LLM.CONTEXT_LENGTH) or 0
        trained = metadata.number(Keys.Rope.SCALING_ORIG_CTX_LEN) or longest
        if any(tensor.name == _LONG_ROPE for tensor in self.header.tensors):
            overrides[0].key = metadata.name(Keys.Rope.SCALING_ORIG_CTX_LEN).encode()
            overrides[0].number = 1 if longest > trained else 2**31 - 1
        return overrides

    def _types(self) -> tuple[int, int]:
        """Types of keys and of values.

        Where they are float16 both, llama.cpp's attention on a CPU splits its sums over threads from 512 cells on if
        one token is decoded, and takes tiles of 64 if many are: a tree would be rounded otherwise than AR decoding.
        With types that differ each token is computed by itself. Keys in Q8_0 are as exact here as float16 and faster
        than bfloat16 values, which heads of another width get. Values that are a part of the keys have their type:
        bfloat16, of which it splits nothing.
        """
        if self.library.supports_gpu_offload():
            return F16, F16
        if self.header.is_latent:
            return BF16, BF16
        return (Q8_0, F16) if self.header.widths[0] % _BLOCK == 0 else (F16, BF16)


def unloadable(library: Library, path: Path) -> DraftreeError:
    """The error of a model that llama.cpp has just failed to load, with the reason out of its complaints."""
    reason = library.complaint().split("error loading model: ")[-1]
    if "unknown model architecture" in reason:
        return UnsupportedModelError(
            f"{path}: {reason} to {library.name}: use backend 'transformers', if transformers knows it"
        )
    return ModelFileError(f"llama.cpp cannot load {path}: {reason}: {AGAIN}, or use backend 'transformers'")


def check_decoder(library: Library, model: int, header: GGUFHeader) -> None:
    """Reject a loaded model that does not generate text.

    Args:
        model: the pointer to it.

    Raises:
        UnsupportedModelError: it is no decoder.
    """
    causal = header.metadata.flag(Keys.Attention.CAUSAL, True)
    if library.model_has_encoder(model) or not library.model_has_decoder(model) or not causal:
        raise UnsupportedModelError(
            f"{header.path} ({header.architecture}) is an encoder or an encoder-decoder model: load a decoder-only one"
        )
