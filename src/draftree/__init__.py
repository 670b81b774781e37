"""Lossless speculative decoding with draft trees that change shape at every step.

engine = draftree.load_engine("smollm2", drafter="lookup", nodes=7)
for chunk in engine.stream(draftree.user("Why is the sky blue?")):
    print(chunk.text, end="", flush=True)
"""

from .config import Budget, SamplingParams
from .custom_generate import custom_generate, generate_with
from .draft.entropy import BranchingSteps, EntropyStop, EntropyTree, StaticTree
from .draft.load import load_drafter
from .draft.methods import METHODS
from .engine import Engine, Generation, load_engine
from .errors import DraftreeError, InputError, RunError
from .models.hf import HFModel
from .models.load import load
from .sequence import Chunk, Seconds, Stats
from .text import user
from .tree import DraftTree
from .verify.schemes import SCHEMES, Relaxed

__all__ = [
    "METHODS",
    "SCHEMES",
    "BranchingSteps",
    "Budget",
    "Chunk",
    "DraftTree",
    "DraftreeError",
    "Engine",
    "EntropyStop",
    "EntropyTree",
    "Generation",
    "HFModel",
    "InputError",
    "Relaxed",
    "RunError",
    "SamplingParams",
    "Seconds",
    "StaticTree",
    "Stats",
    "custom_generate",
    "generate_with",
    "load",
    "load_drafter",
    "load_engine",
    "user",
]
