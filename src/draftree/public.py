"""What ``import draftree`` offers: the names that are imported here as themselves (``from .tree import X as X``).

What works inside transformers is loaded when it is named.
"""

from __future__ import annotations as _annotations

from importlib import import_module as _import_module

from .beams.beam_engine import BeamEngine as BeamEngine
from .beams.beam_engine import BeamGeneration as BeamGeneration
from .beams.beam_engine import Hypothesis as Hypothesis
from .beams.beam_engine import load_beam_engine as load_beam_engine
from .beams.beam_engine import load_beam_source as load_beam_source
from .beams.forest import BeamParams as BeamParams
from .config import Budget as Budget
from .config import SamplingParams as SamplingParams
from .drafters.base import DraftSource as DraftSource
from .drafters.base import Scorer as Scorer
from .drafters.base import UnscoredNode as UnscoredNode
from .drafters.grow import TreeDrafter as TreeDrafter
from .drafters.registry import load_drafter as load_drafter
from .engine.engine import Engine as Engine
from .engine.engine import Handle as Handle
from .engine.engine import load_engine as load_engine
from .engine.scheduler import SchedulerParams as SchedulerParams
from .engine.speculation import Observer as Observer
from .engine.speculation import Speculation as Speculation
from .engine.speculation import SpeculationParams as SpeculationParams
from .engine.trace import Trace as Trace
from .errors import CacheFullError as CacheFullError
from .errors import DraftreeError as DraftreeError
from .errors import DraftreeWarning as DraftreeWarning
from .errors import InputError as InputError
from .errors import QueueFullError as QueueFullError
from .errors import RunError as RunError
from .errors import needs_extra as _needs_extra
from .models.base import Capabilities as Capabilities
from .models.base import LanguageModel as LanguageModel
from .models.base import Nodes as Nodes
from .models.base import Row as Row
from .models.loading import load as load
from .page.show import TracePage as TracePage
from .page.show import show as show
from .papers.c2t import ClassifierTree as ClassifierTree
from .papers.c2t import read_classifier as read_classifier
from .papers.cascade import StageStats as StageStats
from .papers.entropy_trees import BranchingSteps as BranchingSteps
from .papers.entropy_trees import BudgetTree as BudgetTree
from .papers.entropy_trees import EntropyStop as EntropyStop
from .papers.entropy_trees import EntropyTree as EntropyTree
from .papers.hsddw import DynamicWindow as DynamicWindow
from .papers.opt_tree import OptTree as OptTree
from .policies.auto import AutoTree as AutoTree
from .policies.base import Candidates as Candidates
from .policies.base import Child as Child
from .policies.base import ChildSampler as ChildSampler
from .policies.base import Frontier as Frontier
from .policies.base import GrowthPolicy as GrowthPolicy
from .policies.best_paths import Eagle2Tree as Eagle2Tree
from .policies.fixed import RankTree as RankTree
from .policies.fixed import StaticTree as StaticTree
from .policies.methods import METHODS as METHODS
from .request import Chunk as Chunk
from .request import Generation as Generation
from .request import Request as Request
from .request import Seconds as Seconds
from .request import Stats as Stats
from .scores import NumpyScores as NumpyScores
from .scores import Scores as Scores
from .text.encoding import user as user
from .tree import DraftTree as DraftTree
from .verify.base import NodeByNode as NodeByNode
from .verify.base import UniformDraws as UniformDraws
from .verify.base import Visit as Visit
from .verify.schemes import SCHEMES as SCHEMES
from .verify.schemes import Relaxed as Relaxed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .integrations.hf_generate import as_processor as as_processor
    from .integrations.hf_generate import custom_generate as custom_generate
    from .integrations.hf_generate import generate_with as generate_with
    from .models.huggingface.hf_model import HFModel as HFModel

_OF_TRANSFORMERS = {
    "HFModel": ".models.huggingface.hf_model",
    "as_processor": ".integrations.hf_generate",
    "custom_generate": ".integrations.hf_generate",
    "generate_with": ".integrations.hf_generate",
}
NAMES = [name for name in vars() if name[0] != "_" and name != "TYPE_CHECKING"] + [*_OF_TRANSFORMERS]


def __getattr__(name: str) -> object:
    if name not in _OF_TRANSFORMERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _needs_extra("torch", f"draftree.{name}"):
        return getattr(_import_module(_OF_TRANSFORMERS[name], __package__), name)
