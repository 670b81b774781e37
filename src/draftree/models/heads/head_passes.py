"""The passes of a draft head: of each token the state that it predicts, and logits over its row's draft vocabulary."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..huggingface.attention import attend_as_one
from ..huggingface.cache import TreeCache, packed, padded
from ..huggingface.pass_inputs import Longs, on_device
from ..huggingface.runner import NO_CHOICE, DevicePass, EagerRunner, Made
from ..huggingface.torch_scores import ranked
from ..protocols import FeatureModel
from .eagle_network import EagleNetwork


class HeadPasses(EagerRunner):
    """Makes the passes of one head: of each token the state that it predicts, and logits.

    Args:
        network: the head's network.
        output: its output layer, or the target's for the vocabulary.
        vocabulary: [D] int64 tokens of ``output``.
        target: whose embeddings it reads where it has none of its own, and whose output layer further tokens have.
        best: how many of the most probable tokens are found with the logits; 0: none, and no pass chooses nodes.
    """

    def __init__(
        self, network: EagleNetwork, output: nn.Linear, vocabulary: Longs, target: FeatureModel, best: int
    ) -> None:
        self._network, self._output, self._target, self.best = network, output, target, best
        self.device = output.weight.device
        (self._vocabulary,) = on_device(self.device, vocabulary)
        self._turns: Tensor | None = None

    def make(self, step: DevicePass, cache: TreeCache) -> Made:
        """One pass (``EagerRunner.make``)."""
        network, at = self._network, cache.placement
        if self._turns is None or self._turns.shape[0] < at.slots:
            self._turns = network.turns(torch.arange(at.slots, device=self.device))
        tokens, mask, embed = step.inputs.tokens, step.inputs.mask(), network.embed_tokens
        embedded = self._target.embeddings(tokens) if embed is None else embed.forward(tokens)
        turns = self._turns[step.inputs.positions[None]]
        states = network.read(embedded[None], step.states[None])  # type: ignore[index]
        for number, block in enumerate(network.blocks):
            queries, keys, values = block.attend_with(states, turns)
            every = cache.update(keys.transpose(1, 2), values.transpose(1, 2), number)
            lines = padded(queries.transpose(1, 2), at.count, at.sources)
            found = packed(attend_as_one(lines, *every, mask, None), at.index)
            states = block.finish(states, found.flatten(2))
        own, predicted = step.inputs, network.predicted(states)[0]
        wanted, rows = (each.index_select(0, own.wanted) for each in (predicted, own.rows))
        made = self.scored(wanted, own.further, own.places, rows)
        if step.choice == NO_CHOICE:
            return replace(made, states=predicted)
        assert made.best is not None  # noqa: S101
        nodes = torch.stack((tokens, own.before), dim=1).index_select(0, own.wanted).to(made.best.dtype)
        chosen = own.best_below(made.best, *step.choice)
        return replace(made, states=predicted, best=torch.cat((made.best, nodes), dim=1), chosen=chosen)

    def scored(self, states: Tensor, further: Tensor, places: Tensor, rows: Tensor) -> Made:
        """Logits after [W, H] states, each over its row's draft vocabulary.

        Args:
            further, places: [U] and [B, X] (``Further``).
            rows: [W] the row of each state among the B.
        """
        states, ids = self._network.readout(states), self._vocabulary.expand(len(states), -1)
        logits = self._output.forward(states)
        if len(further):
            weight, bias = self._target.output_rows(further)
            others = linear(states, weight.to(states.dtype), None if bias is None else bias.to(states.dtype))
            own = places.index_select(0, rows)
            there = own.clamp(min=0)
            others = others.gather(1, there).masked_fill(own < 0, float("-inf"))
            logits, ids = torch.cat([logits, others], dim=-1), torch.cat([ids, further[there]], dim=-1)
        if not self.best:
            return Made(None, logits, ids)
        places, found = ranked(logits.float(), self.best)
        return Made(None, logits, ids, torch.cat([ids.gather(1, places), found], dim=1))
