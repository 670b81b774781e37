"""Load models and heads, damage their files, and go on: run by ``test_overwritten_files``.

python -m tests.models.overwritten FOLDER TARGET[,HEAD]...

prints for each damage the digests of all models, whose names have "@" in place of the folder, which has a copy of all
files for each damage, by its name.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from draftree.models.base import LanguageModel, Nodes, prefill
from draftree.models.heads.head_folder import load_head
from draftree.models.loading import load
from draftree.models.protocols import DraftHead, feature_model

TEXT, MORE = [5, 20, 31, 7, 60, 4, 4, 55], [9, 8]
TREE = Nodes([9, 8, 7, 6, 5], [-1, 0, 0, 1, -1])
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "none": lambda data: data,
    "truncated": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "another file": lambda data: data[::-1],
}


def overwrite(path: Path, damage: str) -> None:
    """Damage a file, or all files of a folder, where they lie: no new file takes their place."""
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        file.write_bytes(DAMAGES[damage](file.read_bytes()))


def answers(model: LanguageModel, head: DraftHead | None) -> str:
    """A digest of scores, rows of weights, a text's ids, and what a head predicts."""
    features = feature_model(model)
    row, ids = prefill(model, TEXT), np.arange(model.capabilities.vocab_size)
    found = [
        model.extend([row], [TREE]).logits(range(5)),
        features.embedding_rows(ids),
        features.output_rows(torch.from_numpy(ids))[0].detach().numpy(),
    ]
    if model.tokenizer is not None:
        found.append(np.array(model.tokenizer.encode("the rain")))
    if head is not None:
        own = head.open()
        found.append(head.read([own], [TEXT[1:]], [row]).logits([0]))
        model.commit(row, [0, 1])
        found.append(head.read([own], [MORE], [row]).logits([0]))
        found.append(head.extend([own], [Nodes(MORE, [-1, -1])]).logits(range(2)))
    return hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in found)).hexdigest()


def main(folder: str, *given: str) -> None:
    for damage in DAMAGES:
        names = [each.replace("@", f"{folder}/{damage}") for each in given]
        sys.stdout.write(json.dumps(digests(damage, names)) + "\n")
        sys.stdout.flush()


def digests(damage: str, names: list[str]) -> list[str]:
    """What the models answer whose files are damaged when they are loaded."""
    found = []
    for each in names:
        target, *heads = map(Path, each.split(","))
        model = load(str(target))
        head = load_head(heads[0], model) if heads else None
        for path in (target, *heads):
            overwrite(path, damage)
        found.append(answers(model, head))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
