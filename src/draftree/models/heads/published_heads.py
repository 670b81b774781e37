"""Heads for targets that none is installed for, in a data package or on the hub, each for one target."""

from __future__ import annotations

from typing import NamedTuple

from ...installation import install_data
from ..base import LanguageModel
from ..protocols import FeatureModel


class PublishedHead(NamedTuple):
    """A head, and the target that it was made for.

    Attributes:
        name: of the data package, or on the hub.
        target: name of the target.
        architecture, hidden_size, layers, vocab_size: of the target, in a GGUF file's words.
        package: the data package that has it (``installation.install_data``); "": it is on the hub.
    """

    name: str
    target: str
    architecture: str
    hidden_size: int
    layers: int
    vocab_size: int
    package: str = ""

    @property
    def use(self) -> str:
        """How to draft with it."""
        return install_data(self.package) if self.package else "download it and give --drafter FOLDER"


PUBLISHED = (
    PublishedHead("draftree-coder-head", "Qwen2.5-Coder-1.5B-Instruct", "qwen2", 1536, 28, 151936, "coder-head"),
    PublishedHead("AngelSlim/Qwen3-4B_eagle3", "Qwen3-4B", "qwen3", 2560, 36, 151936),
    PublishedHead("AngelSlim/Qwen3-8B_eagle3", "Qwen3-8B", "qwen3", 4096, 36, 151936),
    PublishedHead(
        "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", "Llama-3.1-8B-Instruct", "llama", 4096, 32, 128256
    ),
)


def published_for(target: LanguageModel) -> PublishedHead | None:
    """The published head for a target of these sizes, by whatever name it was loaded; None: none is known.

    Fine-tuned copies have the sizes too: what a head for another copy drafts is right less often.
    """
    if not isinstance(target, FeatureModel):
        return None
    can = target.capabilities
    architecture = can.architecture.lower().removesuffix("forcausallm")
    sizes = (architecture, target.hidden_size, target.layers, can.vocab_size)
    return next((head for head in PUBLISHED if head[2:6] == sizes), None)
