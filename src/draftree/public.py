"""What ``import draftree`` offers, all of it loaded: torch and transformers too."""

from __future__ import annotations

from .beams.beam_engine import BeamEngine, BeamGeneration, Hypothesis
from .beams.params import BeamParams
from .config import Budget, SamplingParams
from .drafters.corpus import Corpus
from .drafters.registry import load_drafter
from .engine.engine import Engine, Generation, Handle
from .engine.scheduler import SchedulerParams
from .engine.speculation import Speculation, SpeculationParams
from .engines import load_beam_engine, load_beam_source, load_engine
from .errors import DraftreeError, DraftreeWarning, InputError, QueueFullError, RunError
from .integrations.hf_generate import as_processor, custom_generate, generate_with
from .models.huggingface.hf_model import HFModel
from .models.loading import load
from .policies.auto.policy import AutoTree
from .policies.base import GrowthPolicy
from .policies.best_paths import Eagle2Tree, OptTree
from .policies.c2t import ClassifierTree, LearnedWidth, read_classifier
from .policies.chains import DynamicWindow, EntropyStop, Window
from .policies.entropy import BranchingSteps, BudgetTree, EntropyTree
from .policies.fixed import RankTree, StaticTree
from .policies.methods import METHODS
from .request import Chunk, Seconds, StageStats, Stats
from .text.encoding import user
from .tracing.records import EndRecord, RequestRecord, RunRecord, StepRecord
from .tracing.trace import Observer, Trace, read_trace
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
    "Corpus",
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
    "Handle",
    "HFModel",
    "Hypothesis",
    "InputError",
    "LearnedWidth",
    "StageStats",
    "Observer",
    "OptTree",
    "QueueFullError",
    "RankTree",
    "Relaxed",
    "RunError",
    "RunRecord",
    "SamplingParams",
    "SchedulerParams",
    "Seconds",
    "RequestRecord",
    "Speculation",
    "SpeculationParams",
    "StaticTree",
    "Stats",
    "StepRecord",
    "Trace",
    "Window",
    "as_processor",
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
