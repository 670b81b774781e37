"""Lossless speculative decoding with draft trees that change shape at every step.

engine = draftree.load_engine("smollm2")
for chunk in engine.stream(draftree.user("Why is the sky blue?")):
    print(chunk.text, end="", flush=True)
"""

from . import openmp as openmp  # first: sets how threads wait, before torch loads
from .beams.engine import BeamEngine, BeamGeneration, Hypothesis
from .beams.params import BeamParams
from .config import Budget, SamplingParams
from .draft.auto import AutoTree
from .draft.best import Eagle2Tree, OptTree
from .draft.c2t import ClassifierTree
from .draft.classifier_file import read_classifier
from .draft.entropy import BranchingSteps, BudgetTree, EntropyStop, EntropyTree, StaticTree
from .draft.learned import LearnedWidth
from .draft.load import load_drafter
from .draft.methods import METHODS
from .draft.policy import GrowthPolicy
from .draft.static import RankTree
from .draft.window import DynamicWindow, Window
from .engine import Engine, Generation
from .errors import DraftreeError, DraftreeWarning, InputError, RunError
from .hf_generate import custom_generate, generate_with
from .load import load_beam_engine, load_beam_source, load_engine
from .models.hf import HFModel
from .models.load import load
from .records import EndRecord, RequestRecord, RunRecord, StepRecord
from .request import Chunk, Level, Seconds, Stats
from .text import user
from .trace import Observer, Trace, read_trace
from .tree import DraftTree
from .verify.schemes import SCHEMES, Relaxed

__all__ = [
    "METHODS",
    "SCHEMES",
    "AutoTree",
    "BeamEngine",
    "BeamGeneration",
    "BeamParams",
    "BranchingSteps",
    "BudgetTree",
    "Budget",
    "Chunk",
    "ClassifierTree",
    "DraftTree",
    "DraftreeError",
    "DraftreeWarning",
    "DynamicWindow",
    "Eagle2Tree",
    "EndRecord",
    "Engine",
    "EntropyStop",
    "EntropyTree",
    "Generation",
    "GrowthPolicy",
    "HFModel",
    "Hypothesis",
    "InputError",
    "LearnedWidth",
    "Level",
    "Observer",
    "OptTree",
    "RankTree",
    "Relaxed",
    "RunError",
    "RunRecord",
    "SamplingParams",
    "Seconds",
    "RequestRecord",
    "StaticTree",
    "Stats",
    "StepRecord",
    "Trace",
    "Window",
    "custom_generate",
    "generate_with",
    "load",
    "load_beam_engine",
    "load_beam_source",
    "load_drafter",
    "load_engine",
    "read_classifier",
    "read_trace",
    "user",
]
