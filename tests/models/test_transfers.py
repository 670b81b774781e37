"""What a step brings to an accelerator, what it brings back, and that it waits for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftree.config import SamplingParams
from draftree.drafters.base import Drafter
from draftree.drafters.draft_model import EagleSource, ModelSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.models.heads.eagle_model import HeadModel
from draftree.models.heads.head_folder import load_head
from draftree.models.huggingface import hf_model, torch_scores
from draftree.models.huggingface.cache import long_row
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.torch_scores import TorchScores
from draftree.papers.opt_tree import OptTree
from draftree.request import Outcome

from ..accelerator import Accelerator
from ..heads import random_head
from ..pairs import begun, relative
from ..published import KINDS, saved
from ..tiny import VOCAB, tiny

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26, 53, 58, 9]]
RUNNERS = pytest.mark.parametrize("runner", ["eager", "graph"])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """Scores stay where they are, as on an accelerator."""
    monkeypatch.setattr(hf_model, "scores_of", TorchScores)
    torch_scores._counters.cache_clear()  # they lie where they were made
    with Accelerator() as found:
        yield found


@pytest.mark.parametrize(
    "fault",
    [
        lambda x: x[[0, 1]],
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: bool(x.any()),
        lambda x: x.max().item(),
        lambda x: x.tolist(),
        lambda x: x + torch.ones(3),
    ],
)
def test_what_waits_or_transfers_unasked_is_seen(fault: Callable[[Tensor], object]) -> None:
    with Accelerator() as device:
        x = torch.ones(3, device="cpu")
        (x + 1)[:2].sum()
        assert not device.strays
        fault(x)
        assert device.strays


def test_transfers_are_counted() -> None:
    with Accelerator() as device:
        x, y = torch.ones(3).to("cpu"), torch.zeros(3, device="cpu")
        y.copy_(torch.ones(3))
        y[1:] = torch.ones(2)
        (x + y).to("cpu").cpu().numpy()
        assert (device.uploads, device.downloads, device.strays) == (3, 1, [])


def on(device: Accelerator, model: HFModel) -> HFModel:
    device.take([*model.model.parameters(), *model.model.buffers()])
    return model


def target_on(device: Accelerator, runner: str, kind: str = "llama") -> HFModel:
    return on(device, HFModel(tiny(kind), runner=runner, self_test=False))


def head_drafter(device: Accelerator, head: HeadModel) -> TreeDrafter:
    device.take(head.layers.parameters())
    return TreeDrafter(OptTree(delta=0.1), EagleSource(head, head.capabilities.vocab_size))


def steps(
    device: Accelerator, target: HFModel, drafter: Drafter, prompts: Sequence[list[int]], temperature: float = 0.0
) -> Iterator[list[Outcome]]:
    """Outcomes of steps; what each of them has transferred is counted when it is given."""
    engine = Engine(target, Speculation(drafter, 12))
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=5, ignore_eos=True)
    running = [begun(engine.stepper, engine.request(prompt, params)) for prompt in prompts]
    while running := [one for one in running if one.finish_reason is None]:
        device.reset()
        yield engine.stepper.step(running)


def moved(outcomes: Sequence[Outcome]) -> int:
    """Requests whose accepted nodes are not the first ones: the last token, then a path of the tree."""
    return sum(outcome.path != [*range(len(outcome.path))] for outcome in outcomes)


@pytest.mark.parametrize(
    ("runner", "temperature", "count"), [("eager", 0.0, 1), ("eager", 1.0, 3), ("graph", 0.0, 3), ("graph", 1.0, 1)]
)
@pytest.mark.parametrize("kind", ["llama", "gemma3_window"])
def test_a_step_uploads_once_for_its_pass_and_once_for_its_draws(
    kind: str, runner: str, temperature: float, count: int, device: Accelerator
) -> None:
    """A pass's tokens, positions, slots and masks are one transfer; where nodes move, their numbers are another."""
    target, drafter = target_on(device, runner, kind), TreeDrafter(OptTree(), NgramSource(shortest=1))
    trees = 0
    for outcomes in steps(device, target, drafter, PROMPTS[:count], temperature):
        widths = [1 + len(outcome.tree) for outcome in outcomes]
        passes = 1 if long_row(widths) is None else 2  # rows of very different widths share none
        assert device.strays == []
        assert device.downloads == 1
        assert device.uploads == passes + (temperature > 0) + moved(outcomes)
        trees += sum(len(outcome.tree) > 0 for outcome in outcomes)
    assert trees > (3 if kind == "llama" else 2)


@RUNNERS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_pass_of_a_draft_model_is_one_round_trip(runner: str, temperature: float, device: Accelerator) -> None:
    source = ModelSource(on(device, HFModel(relative(), runner=runner, self_test=False)), VOCAB)
    target, drafter = target_on(device, runner), TreeDrafter(OptTree(), source)
    passes = 0
    for outcomes in steps(device, target, drafter, PROMPTS[:1], temperature):
        assert device.strays == []
        assert device.downloads == 1 + drafter.passes
        least = (1 + drafter.passes) * (1 + (temperature > 0)) + moved(outcomes)
        assert least <= device.uploads <= least + len(outcomes), "the draft model may move nodes too"
        passes += drafter.passes
    assert passes > 3


@pytest.mark.parametrize(
    ("kind", "runner", "temperature"),
    [
        *((kind, "graph", 0.0) for kind in ("draftree's", "eagle3")),
        ("eagle3", "graph", 1.0),
        ("draftree's", "eager", 1.0),
        ("eagle3", "eager", 0.0),
    ],
)
def test_each_layer_of_a_head_is_one_round_trip(
    kind: str, runner: str, temperature: float, device: Accelerator, tmp_path: Path
) -> None:
    """Tokens that are new in the text, which a head drafts from too, come with a pass's others."""
    target = target_on(device, runner)
    head = load_head(saved(KINDS[kind], tmp_path), target) if kind in KINDS else random_head(target)
    assert isinstance(head, HeadModel)
    drafter, layers = head_drafter(device, head), 0
    for number, outcomes in enumerate(steps(device, target, drafter, PROMPTS[:1], temperature)):
        if not number:  # it makes the table of rotary positions
            continue
        assert device.strays == []
        passes = drafter.passes
        assert device.downloads - 1 == passes
        want = (1 + passes) * (1 + (temperature > 0)) + 2 * moved(outcomes)
        assert device.uploads <= want
        layers += passes
    assert layers > 10
