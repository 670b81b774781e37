"""Run as a script: llama.cpp's own converter makes a GGUF file beside each folder of a checkpoint, without a tokenizer.

It is a process of its own, because the package of the converter brings a package ``gguf`` of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class


def convert(folder: Path, kind: str) -> None:
    """Write ``folder``.gguf.

    Args:
        kind: of the matrices, by the name of llama.cpp's file type ("ALL_F32").
    """
    named = get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT)
    converter: Any = get_model_class(named)
    changed = {"model_arch": converter.model_arch, "set_vocab": converter._set_vocab_none}
    without_tokenizer = type("Tiny", (converter,), changed)
    with torch.inference_mode():
        without_tokenizer(folder, gguf.LlamaFileType[kind], folder.with_name(f"{folder.name}.gguf")).write()


if __name__ == "__main__":
    for folder in sys.argv[2:]:
        convert(Path(folder), sys.argv[1])
