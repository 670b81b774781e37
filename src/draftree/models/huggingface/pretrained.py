"""Folders and hub ids of transformers models, and GGUF files, read without trust.

No code of a model is run, no pickle is read, and a weight that the checkpoint lacks is an error: transformers would
prompt on standard input for consent to run the code, and draw the weight at random. Knows no names and no caches.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from ...artifacts import LARGEST_DATA, read_bytes
from ...errors import DraftreeError, DraftreeWarning, ModelFileError, UnsupportedModelError, first_line

_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_READ = (_CONFIG, "generation_config.json", "tokenizer_config.json")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SAFE = (".safetensors", ".safetensors.index.json")
_NAMED = 3
"""Weights that a message names."""


def read_pretrained(
    source: str, name: str, *, dtype: torch.dtype | None, attention: str | None, parts: int = 1
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer.

    Args:
        source: folder or hub id.
        name: what messages call it.
        dtype: of the weights; None: the checkpoint's own.
        attention: "sdpa" or "eager"; None: what transformers prefers for the model.
        parts: processes that share the weights; this one reads its part (``tensor_parallel``).

    Raises:
        UnsupportedModelError: it cannot be split.
        ModelFileError: it cannot be read, needs code of its own, is pickled, or lacks weights.
        OSError: a hub id that the hub does not give.
    """
    folder = Path(source)
    if local := folder.is_dir():
        _check_files(folder, name)
    passed = () if local else (OSError,)
    with _reading(name, "config", passed=passed):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        # A config.json may name weights that are pickled, and attention kernels to download and run.
        explicit = getattr(config, "transformers_weights", None)
        if explicit is not None and not str(explicit).endswith(_SAFE):
            raise _pickled(name, str(explicit))
        config._attn_implementation = attention
    if parts > 1:
        _check_parts(config.get_text_config(decoder=True), name, parts)
    return _read(source, name, passed=passed, parts=parts, dtype=dtype or "auto", config=config)


def _check_parts(config: Any, name: str, parts: int) -> None:
    """Transformers can split the layers of such a model evenly."""
    if not config.base_model_tp_plan:
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) has no tensor-parallel plan in transformers: run it without torchrun"
        )
    heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    if shared % parts or heads % parts:
        even = [str(n) for n in range(2, shared + 1) if not shared % n and not heads % n]
        raise UnsupportedModelError(
            f"{name} has {heads} attention heads and {shared} of keys and values, which {parts} processes cannot share "
            f"evenly: {'use ' + ' or '.join(even) if even else 'run it without torchrun'}"
        )


def read_gguf(path: Path, *, bars: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a GGUF file in float32, and its tokenizer.

    Raises:
        ModelFileError: it cannot be read, or lacks weights.
    """
    return _read(str(path.parent), str(path), bars=bars, dtype=torch.float32, gguf_file=path.name)


def _read(
    source: str,
    name: str,
    *,
    dtype: torch.dtype | str,
    bars: bool = False,
    passed: tuple[type[Exception], ...] = (),
    parts: int = 1,
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    options["trust_remote_code"] = False
    # Sizes that differ would be refused without their names, so they are taken here and refused below.
    strict = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    split = {"distributed_config": DistributedConfig(tp_plan="auto")} if parts > 1 else {}
    with _reading(name, "weights", bars=bars, passed=passed):
        read: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **strict, **split, **options)
    model, report = read
    _check_weights(report, name)
    with _reading(name, "tokenizer", bars=bars):
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
        raise ModelFileError(f"cannot load {name!r}: it lacks {_list(missing)}: copy it again, whole")
    if other := report["mismatched_keys"]:
        weight, found, wanted = min(other)
        raise ModelFileError(
            f"cannot load {name!r}: {_list(key for key, *_ in other)} of another size than its config: {weight} is "
            f"{list(found)}, not {list(wanted)}: copy it again, weights and {_CONFIG}"
        )
    if unused := report["unexpected_keys"]:
        warnings.warn(f"{name} has {_list(unused)} more than its architecture uses", DraftreeWarning, stacklevel=4)


def _list(weights: Any) -> str:
    """How many there are, and the first by name."""
    names = sorted(weights)
    more = ", ..." if len(names) > _NAMED else ""
    return f"{len(names)} weight{'s' * (len(names) > 1)} ({', '.join(names[:_NAMED])}{more})"


@contextlib.contextmanager
def _reading(name: str, part: str, *, bars: bool = False, passed: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Silence transformers, and turn its errors, but for those of ``passed``, into one line."""
    try:
        with quiet(bars):
            yield
    except Exception as error:  # noqa: BLE001 - readers raise what they like, that of tokenizers bare Exceptions
        if isinstance(error, (DraftreeError, MemoryError, torch.OutOfMemoryError, *passed)):
            raise
        if "trust_remote_code" in str(error):
            why, way_out = "it needs Python code of its own, which is not run", "use a model that transformers has"
        else:
            plain = isinstance(error, (OSError, ValueError, RuntimeError))
            why = first_line(error) if plain else f"{type(error).__name__}: {first_line(error)}"
            way_out = "use a complete model that transformers can load"
        raise ModelFileError(f"cannot load {name!r}, its {part}: {why}: {way_out}") from None


@contextlib.contextmanager
def quiet(bars: bool = False) -> Iterator[None]:
    """Silence the log lines of transformers and the hub, and transformers' progress bars unless wanted."""
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
