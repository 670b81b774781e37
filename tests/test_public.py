"""What ``import draftree`` offers, and what the README shows of it."""

from __future__ import annotations

import pkgutil

import draftree


def test_the_public_names_are_these() -> None:
    assert set(draftree.__all__) == {
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
    }


def test_every_public_name_has_a_docstring() -> None:
    for name in draftree.__all__:
        assert isinstance(getattr(draftree, name), dict) or getattr(draftree, name).__doc__, name


def test_no_module_hides_a_public_name() -> None:
    """Names are looked up when they are used: a module of the same name, once imported, would come instead."""
    modules = {module.name for module in pkgutil.iter_modules(draftree.__path__)}
    assert not modules & set(draftree.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(draftree, "no_such_name") and "load_engine" in dir(draftree)
