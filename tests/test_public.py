"""What ``import draftree`` offers, and what the README shows of it."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

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
        "Budget",
        "BudgetTree",
        "Candidates",
        "CacheFullError",
        "Capabilities",
        "Child",
        "ChildSampler",
        "Chunk",
        "ClassifierTree",
        "DraftreeError",
        "DraftreeWarning",
        "DraftSource",
        "DraftTree",
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
        "LanguageModel",
        "NodeByNode",
        "Nodes",
        "NumpyScores",
        "Observer",
        "OptTree",
        "QueueFullError",
        "RankTree",
        "Relaxed",
        "Request",
        "Row",
        "RunError",
        "SamplingParams",
        "SchedulerParams",
        "Scorer",
        "Scores",
        "Seconds",
        "Speculation",
        "SpeculationParams",
        "StageStats",
        "StaticTree",
        "Stats",
        "Trace",
        "TracePage",
        "TreeDrafter",
        "UniformDraws",
        "UnscoredNode",
        "Visit",
        "as_processor",
        "custom_generate",
        "generate_with",
        "load",
        "load_beam_engine",
        "load_beam_source",
        "load_drafter",
        "load_engine",
        "read_classifier",
        "show",
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


def test_an_import_loads_nothing_and_changes_nothing_for_the_program() -> None:
    code = """
import os, signal, sys, threading, warnings
def state():
    handlers = {s: signal.getsignal(s) for s in signal.valid_signals()}
    return dict(os.environ), handlers, list(warnings.filters), list(sys.path), threading.active_count()
before, modules = state(), set(sys.modules)
import draftree
assert state() == before
print(*{name.partition(".")[0] for name in set(sys.modules) - modules} - sys.stdlib_module_names)
draftree.load_engine, draftree.SamplingParams, draftree.user
assert state()[0] == before[0]
assert not {"torch", "transformers"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)  # noqa: S603 - the code above
    assert (done.returncode, done.stdout) == (0, "draftree\n"), done.stderr
