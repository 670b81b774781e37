"""Any model as a drafter: what it must be able to do, and whether its text is translated."""

from __future__ import annotations

from ..errors import NoTreesError, VocabularyError
from ..models.base import LanguageModel
from ..models.translated import TranslatedModel


def fitted(model: LanguageModel, target: LanguageModel) -> LanguageModel:
    """A draft model as one of a target's token ids: itself, or a ``TranslatedModel``.

    Raises:
        NoTreesError: it cannot grow trees.
        VocabularyError: its token ids are others, and one of the two has no tokenizer.
    """
    if reason := model.capabilities.no_trees:
        raise NoTreesError(f"drafter {model.capabilities.name}", "grow trees", reason, "use another draft model")
    if share_vocabulary(model, target):
        return model
    if bare := next((one for one in (target, model) if one.tokenizer is None), None):
        raise VocabularyError(
            f"drafter {model.capabilities.name} has {model.capabilities.vocab_size} tokens and target "
            f"{target.capabilities.name} {target.capabilities.vocab_size}, and {bare.capabilities.name} has no "
            "tokenizer to translate by: use a drafter with the target's tokens, or drafter 'lookup'"
        )
    return TranslatedModel(model, target)


def share_vocabulary(one: LanguageModel, other: LanguageModel) -> bool:
    """Whether a token id means the same to both; their output layers may be padded differently.

    Bare token ids mean the same where there are as many.
    """
    if one.tokenizer is None or other.tokenizer is None:
        return one.capabilities.vocab_size == other.capabilities.vocab_size
    return one.tokenizer.get_vocab() == other.tokenizer.get_vocab()
