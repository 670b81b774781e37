"""Names to models by transformers; a GGUF file is converted once, to safetensors under the user's cache directory."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import math
import shutil
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import platformdirs
import torch
import torch.distributed as dist
from filelock import FileLock
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from ...artifacts import LARGEST_DATA, check_regular, read_bytes, way_out
from ...errors import (
    ConfigError,
    DraftreeError,
    DraftreeWarning,
    ModelFileError,
    NoTreesError,
    RunError,
    UnknownNameError,
    UnsupportedModelError,
    first_line,
    listed,
)
from ...progress import err
from ..base import EAGER
from ..gguf.gguf_checks import check as check_gguf
from ..gguf.gguf_file import GGUFHeader, fingerprint
from ..memory import check_fits
from ..model_files import DEFAULT_MODEL, EMBEDDED, checkpoint, gguf_path
from .hf_model import HFModel
from .inspection import layer_sizes
from .linear_hf_model import LinearHFModel
from .runner import chosen_runner

AUTO, BACKEND = "auto", "transformers"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_huggingface(
    name: str = DEFAULT_MODEL,
    *,
    dtype: str | None = None,
    device: str | None = None,
    runner: str | None = None,
) -> HFModel | LinearHFModel:
    """A model by transformers (``ModelOptions`` for the arguments); without trees where its rows cannot branch."""
    place, weights = _place(dtype, device)
    chosen_runner(runner, place.type)
    stock, tokenizer = _load(name, place, weights)
    model: HFModel | LinearHFModel
    try:
        model = HFModel(stock, tokenizer, name=name, runner=runner)
    except NoTreesError as error:
        model = LinearHFModel(stock, tokenizer, name, error.reason)
    if (gguf := gguf_path(name)) is not None:  # the same model as over llama.cpp
        model.capabilities = replace(model.capabilities, fingerprint=fingerprint(check_gguf(gguf)))
    return model


def load_part(name: str, **options: Any) -> HFModel:
    """This process's part of a model by transformers, which all processes load at once (``ModelOptions``).

    Raises:
        InputError: the model cannot be found, read or split, or an option does not go with several processes.
    """
    place = "cuda" if torch.cuda.is_available() else "cpu"  # each process has its own
    for option, fitting in (("backend", (AUTO, BACKEND)), ("device", (place,)), ("runner", ())):
        if options.get(option) not in (None, *fitting):
            raise ConfigError(f"{option} {options[option]!r} does not go with torchrun: leave one of them out")
    device, weights = _place(options.get("dtype"), options.get("device"))
    with _agreed():
        stock, tokenizer = _load(name, device, weights, parts=dist.get_world_size())
    return HFModel(stock, tokenizer, name=name, runner=EAGER)


@contextlib.contextmanager
def _agreed() -> Iterator[None]:
    """Let all ranks fail where one does in here.

    Raises:
        DraftreeError: this rank's failure, or that of another one.
    """
    failure: DraftreeError | None = None
    try:
        yield
    except DraftreeError as error:
        failure = error
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if failure is None else str(failure))
    if failure is not None:
        raise failure
    if elsewhere := next(((rank, why) for rank, why in enumerate(failures) if why is not None), None):
        raise RunError(f"process {elsewhere[0]} could not load its part: {elsewhere[1]}")


def load_stock(
    name: str = DEFAULT_MODEL, *, dtype: str | None = None, device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model as transformers has it, to compare with (``ModelOptions`` for the arguments)."""
    return _load(name, *_place(dtype, device))


def _load(
    name: str, place: torch.device, weights: torch.dtype | None, *, parts: int = 1
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    gguf = gguf_path(name)
    source = checkpoint(name) if gguf is None else str(convert(gguf))
    try:
        model, tokenizer = read_pretrained(source, name, dtype=weights, parts=parts)
    except ModelFileError as error:
        if gguf is None:
            raise
        raise ModelFileError(f"the conversion of {gguf.name} is damaged ({error}): delete {source}") from None
    if parts == 1:
        torch.nn.Module.to(model, place)
    if place.type == "cpu":  # where weights of the wanted dtype are those of the mapped file
        for weight in chain(model.parameters(), model.buffers()):
            weight.data = weight.data.clone()
    return model, tokenizer


def _place(dtype: str | None, device: str | None) -> tuple[torch.device, torch.dtype | None]:
    """Device, and dtype of the weights; None is the checkpoint's own."""
    cards = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    devices = ["cpu", *(["cuda", *cards] if cards else [])]
    if device not in (None, *devices):
        raise ConfigError(f"device is {device!r}: choose from {', '.join(devices)}")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}: choose from {', '.join(DTYPES)}")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return place, DTYPES[dtype] if dtype else torch.float32 if place.type == "cpu" else None


def cache_folder() -> Path:
    """Where converted models are kept."""
    return platformdirs.user_cache_path("draftree") / "models"


def convert(gguf: Path) -> Path:
    """The folder with ``gguf`` as float32 safetensors; made at the first call, in one piece or not at all.

    Raises:
        ModelFileError: the file is not a GGUF model that transformers can read.
        RunError: it does not fit into memory, or into the cache directory, or that cannot be written.
    """
    header = check_gguf(gguf)
    folder = cache_folder() / f"{gguf.stem}-{_identity(gguf)}"
    if folder.is_dir():
        return folder
    part = folder.with_name(f"{folder.name}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent.with_suffix(".lock")):  # another process may be at it: wait for that one
            if not folder.is_dir():
                shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
                _check_room(header, folder.parent)
                try:
                    _convert_into(gguf, part)
                    part.rename(folder)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        advice = f"{way_out(error)}, or set XDG_CACHE_HOME to another place"
        raise RunError(f"cannot write the model cache {cache_folder()}: {first_line(error)}: {advice}") from None
    return folder


def _check_room(header: GGUFHeader, folder: Path) -> None:
    """A file's weights fit into memory and into a folder, four bytes each.

    Raises:
        RunError: they do not fit into memory.
        OSError: they do not fit into the folder.
    """
    size = 4 * sum(math.prod(tensor.shape) for tensor in header.tensors)
    check_fits(header.path, size, "it is converted to float32: use backend native or llama.cpp, or a smaller model")
    if size > (free := shutil.disk_usage(folder).free):
        what = f"{header.path.name} takes {size / 1e9:.3g} GB in float32, and {free / 1e9:.3g} GB are free"
        raise OSError(errno.ENOSPC, what)


def _convert_into(gguf: Path, folder: Path) -> None:
    err.print(f"Converting {gguf.name} to safetensors under {folder.parent}; later starts read those")
    with contextlib.redirect_stderr(io.StringIO()):  # bars that show a part of the work
        model, tokenizer = _read(str(gguf.parent), str(gguf), dtype=torch.float32, gguf_file=gguf.name)
    # The weights are plain float32 now; the leftover quantiser would refuse to save them.
    vars(model).update(hf_quantizer=None, is_quantized=False)
    del model.config.quantization_config
    try:
        with quiet():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - a full disk is another exception in each of the writers
        raise OSError(errno.ENOSPC, first_line(error)) from None


def _identity(gguf: Path) -> str:
    """The key of a file's conversion: a digest of its path, size and time of change.

    Its content does not count: to read gigabytes would hold up every start, and a part of them misses weights that
    differ elsewhere. So a file that is copied or touched is converted once more.
    """
    stat = gguf.stat()
    known = [str(gguf.resolve()), stat.st_size, stat.st_mtime_ns]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:12]


_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_READ = (_CONFIG, "generation_config.json", "tokenizer_config.json")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SAFE = (".safetensors", ".safetensors.index.json")
_ONE_AT_A_TIME = threading.Lock()
"""Loads that overlap would leave transformers without tied weights: it swaps a method of all its models meanwhile."""


def read_pretrained(
    source: str, name: str, *, dtype: torch.dtype | None, parts: int = 1
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer.

    Args:
        source: folder or hub id.
        name: what messages call it.
        dtype: of the weights; None: the checkpoint's own.
        parts: processes that share the weights; this one reads its part (``tensor_parallel``).

    Raises:
        UnsupportedModelError: it cannot be split.
        ModelFileError: it cannot be read, needs code of its own, is pickled, or lacks weights.
        UnknownNameError: a hub id that the hub does not give.
    """
    folder = Path(source)
    if is_here := folder.is_dir():
        _check_files(folder, name)
    with _reading(name, "config", is_here=is_here):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        # A config.json may name weights that are pickled, and attention kernels to download and run.
        explicit = getattr(config, "transformers_weights", None)
        if explicit is not None and not str(explicit).endswith(_SAFE):
            raise _pickled(name, str(explicit))
        config._attn_implementation = None  # what transformers prefers for the model
    if parts > 1:
        _check_parts(config.get_text_config(decoder=True), name, parts)
    return _read(source, name, is_here=is_here, parts=parts, dtype=dtype or "auto", config=config)


def _check_parts(config: Any, name: str, parts: int) -> None:
    """Transformers can split the layers of such a model evenly."""
    if not config.base_model_tp_plan:
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) has no tensor-parallel plan in transformers: run it without torchrun"
        )
    for heads, shared, *_ in layer_sizes(config):
        if not (shared % parts or heads % parts):
            continue
        even = [str(n) for n in range(2, shared + 1) if not shared % n and not heads % n]
        raise UnsupportedModelError(
            f"{name} has {heads} attention heads and {shared} of keys and values, which {parts} processes cannot share "
            f"evenly: {'use ' + ' or '.join(even) if even else 'run it without torchrun'}"
        )


def _read(
    source: str,
    name: str,
    *,
    dtype: torch.dtype | str,
    is_here: bool = True,
    parts: int = 1,
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    options["trust_remote_code"] = False
    # Sizes that differ would be refused without their names, so they are taken here and refused below.
    strict = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    split = {"distributed_config": DistributedConfig(tp_plan="auto")} if parts > 1 else {}
    with _ONE_AT_A_TIME, _reading(name, "weights", is_here=is_here):
        read: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **strict, **split, **options)
    model, report = read
    _check_weights(report, name)
    with _reading(name, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **options)
    return model, tokenizer


def _check_files(folder: Path, name: str) -> None:
    """Raise for files that transformers would read in another way, or reject with a message that does not help."""
    if not (folder / _CONFIG).is_file():
        raise ModelFileError(f"folder {name} has no {_CONFIG}: give a folder that holds a transformers model")
    if (folder / _ADAPTER).is_file():
        raise ModelFileError(f"folder {name} holds a PEFT adapter: merge it into its model, and save that")
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled and not any(folder.glob("*.safetensors")):
        raise _pickled(name, pickled[0])
    for path in filter(Path.exists, folder.iterdir()):
        try:
            if not path.is_dir():
                check_regular(path)
        except OSError as error:
            raise ModelFileError(f"cannot load {name!r}: {path.name}: {error.strerror}: copy it again") from None
    for file in _READ:
        try:
            whole = isinstance(json.loads(read_bytes(folder / file, LARGEST_DATA)), dict)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError):
            whole = False
        if not whole:  # a damaged generation_config.json would be left out, and its end-of-sequence tokens with it
            raise ModelFileError(f"cannot load {name!r}: its {file} is not a JSON object: copy it again")


def _pickled(name: str, file: str) -> ModelFileError:
    return ModelFileError(
        f"cannot load {name!r}: its weights are pickled ({file}), and a pickle can run code: where you trust it, load "
        "it with transformers, whose save_pretrained writes safetensors"
    )


def _check_weights(report: dict[str, Any], name: str) -> None:
    """Every weight has to come from the checkpoint; what the checkpoint has beside them costs a warning."""
    if missing := report["missing_keys"]:
        raise ModelFileError(f"cannot load {name!r}: it lacks {listed(missing, 'weight')}: copy it again, whole")
    if mismatched := report["mismatched_keys"]:
        weight, size, expected = min(mismatched)
        raise ModelFileError(
            f"cannot load {name!r}: {listed((key for key, *_ in mismatched), 'weight')} of another size than its "
            f"config: {weight} is {list(size)}, not {list(expected)}: copy it again, weights and {_CONFIG}"
        )
    if unused := report["unexpected_keys"]:
        warnings.warn(
            f"{name} has {listed(unused, 'weight')} more than its architecture uses", DraftreeWarning, stacklevel=4
        )


@contextlib.contextmanager
def _reading(name: str, part: str, *, is_here: bool = True) -> Iterator[None]:
    """Silence transformers, and turn its errors into one line.

    Args:
        is_here: a folder or a file; else a hub id.
    """
    try:
        with quiet():
            yield
    except Exception as error:  # noqa: BLE001 - readers raise what they like, that of tokenizers bare Exceptions
        if isinstance(error, (DraftreeError, MemoryError, torch.OutOfMemoryError)):
            raise
        if isinstance(error, OSError) and not is_here:
            raise UnknownNameError(
                f"no model {name!r}: not a known name ({', '.join(EMBEDDED)}), not a folder or .gguf file, and the hub "
                f"does not give it ({first_line(error)})"
            ) from None
        if "trust_remote_code" in str(error):
            why, way_out = "it needs Python code of its own, which is not run", "use a model that transformers has"
        else:
            plain = isinstance(error, (OSError, ValueError, RuntimeError))
            why = first_line(error) if plain else f"{type(error).__name__}: {first_line(error)}"
            way_out = "use a complete model that transformers can load"
        raise ModelFileError(f"cannot load {name!r}, its {part}: {why}: {way_out}") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the log lines of transformers and the hub, and transformers' progress bars."""
    level, hub = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        hub_logging.set_verbosity(hub)
        if shown:
            transformers_logging.enable_progress_bar()
