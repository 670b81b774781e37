"""Run as a script: llama.cpp's own converter makes a GGUF file beside each folder of a checkpoint, with the vocabulary
of ``tiny_gguf``.

It is a process of its own, because the package of the converter brings a package ``gguf`` of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import torch

from tests.tiny_gguf import TEMPLATE, add_vocabulary, byte_level


class _Names:
    """An enumeration, in which names that this ``gguf`` does not know are None: the converter's modules name them."""

    def __init__(self, known: Any) -> None:
        self._known = known

    def __getattr__(self, name: str) -> Any:
        return getattr(self._known, name, None)


for each in ("MODEL_ARCH", "MODEL_TENSOR"):
    setattr(gguf, each, _Names(getattr(gguf, each)))

from conversion import ModelBase, ModelType, get_model_architecture, get_model_class  # noqa: E402 - with these names


def _configuration(folder: Path, is_mistral_format: bool = False) -> dict[str, Any]:
    """What was published: transformers would read it as a configuration of its own version."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def convert(folder: Path, kind: str) -> None:
    """Write ``folder``.gguf.

    Args:
        kind: of the matrices, by the name of llama.cpp's file type ("ALL_F32").
    """
    numbers = _configuration(folder)
    converter: Any = get_model_class(get_model_architecture(numbers, ModelType.TEXT))
    changed = {
        "model_arch": converter.model_arch,
        "set_vocab": lambda self: add_vocabulary(self.gguf_writer, byte_level(), TEMPLATE),
        "no_mtp": not numbers.get("mtp_num_hidden_layers"),
    }
    with torch.inference_mode():
        tiny = type("Tiny", (converter,), changed)
        made: Any = tiny(folder, gguf.LlamaFileType[kind], folder.with_name(f"{folder.name}.gguf"))
        if inner := getattr(made, "impl", None):  # that of Mistral 3 hands everything to another
            inner.set_vocab = lambda: add_vocabulary(inner.gguf_writer, byte_level(), TEMPLATE)
        made.write()


if __name__ == "__main__":
    ModelBase.load_hparams = staticmethod(_configuration)
    for folder in sys.argv[2:]:
        convert(Path(folder), sys.argv[1])
