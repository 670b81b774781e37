"""What ``import draftree`` offers; what works inside transformers is loaded when it is named."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .beams.beam_engine import BeamEngine, BeamGeneration, Hypothesis, load_beam_engine, load_beam_source
from .beams.forest import BeamParams
from .config import Budget, SamplingParams
from .drafters.registry import load_drafter
from .engine.engine import Engine, Handle, load_engine
from .engine.scheduler import SchedulerParams
from .engine.speculation import Observer, Speculation, SpeculationParams
from .engine.trace import Trace
from .errors import DraftreeError, DraftreeWarning, InputError, QueueFullError, RunError, needs_extra
from .models.loading import load
from .policies.auto import AutoTree
from .policies.base import Child, Frontier, GrowthPolicy
from .policies.best_paths import Eagle2Tree, OptTree
from .policies.c2t import ClassifierTree, read_classifier
from .policies.entropy import BranchingSteps, BudgetTree, DynamicWindow, EntropyStop, EntropyTree, Window
from .policies.fixed import RankTree, StaticTree
from .policies.methods import METHODS
from .request import Chunk, Generation, Seconds, StageStats, Stats
from .text.encoding import user
from .tree import DraftTree
from .verify.schemes import SCHEMES, Relaxed

if TYPE_CHECKING:
    from .integrations.hf_generate import as_processor, custom_generate, generate_with
    from .models.huggingface.hf_model import HFModel

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
    "Child",
    "Chunk",
    "ClassifierTree",
    "DraftTree",
    "DraftreeError",
    "DraftreeWarning",
    "DynamicWindow",
    "Eagle2Tree",
    "Engine",
    "EntropyStop",
    "EntropyTree",
    "Frontier",
    "Generation",
    "GrowthPolicy",
    "Handle",
    "HFModel",
    "Hypothesis",
    "InputError",
    "StageStats",
    "Observer",
    "OptTree",
    "QueueFullError",
    "RankTree",
    "Relaxed",
    "RunError",
    "SamplingParams",
    "SchedulerParams",
    "Seconds",
    "Speculation",
    "SpeculationParams",
    "StaticTree",
    "Stats",
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
    "user",
]

_OF_TRANSFORMERS = {
    "HFModel": ".models.huggingface.hf_model",
    "as_processor": ".integrations.hf_generate",
    "custom_generate": ".integrations.hf_generate",
    "generate_with": ".integrations.hf_generate",
}


def __getattr__(name: str) -> object:
    if name not in _OF_TRANSFORMERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs_extra("torch", f"draftree.{name}"):
        return getattr(import_module(_OF_TRANSFORMERS[name], __package__), name)
