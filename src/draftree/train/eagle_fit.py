"""Fits an EAGLE head and evaluates it on held-out responses; no target pass is made.

The loss is taken over several drafting steps, on the inputs that the head has when it drafts: step 1 reads the target's
hidden states, step j the head's own predictions of step j - 1 in their place, as nodes of depth j - 1 do (training-time
test: Li et al., *EAGLE-3*, Section 3.2; what a network reads and gives is its own).
"""

from __future__ import annotations

import io
import math
import pickle
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, smooth_l1_loss
from torch.nn.utils.rnn import pad_sequence

from ..artifacts import check_regular, write_whole
from ..config import Checked, Count, LearningRate, option
from ..errors import ConfigError
from ..models.base import FINAL_STATE, FeatureSpec, LanguageModel
from ..models.heads.eagle_network import EagleNetwork
from ..models.heads.own_heads import Acceptance
from ..models.huggingface.cache import feature_part
from .responses import Response

DEPTH = 5
RANKS = (1, 2, 4)
"""How deep and among how many of the most probable tokens acceptance is counted."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B responses with N positions at most, of which R at most are learned from.

    A response of L tokens has positions 1 to L - 2: position p has token p and the hidden state at p - 1, and the one
    at p is known. Those from the last one of the prompt on are learned from.

    Attributes:
        tokens: [B, N] int64.
        features: [B, N, F], hidden states at the token before.
        truth: [B, R, H], final hidden states at the learned positions; on padding they mean nothing.
        at: [B, R] int64, column of each learned position.
        valid: [B, R] bool, false on padding.
    """

    tokens: Tensor
    features: Tensor
    truth: Tensor
    at: Tensor
    valid: Tensor

    @classmethod
    def of(cls, responses: Sequence[Response], device: torch.device, read: FeatureSpec = FINAL_STATE) -> Batch:
        """Pad responses to one shape.

        Args:
            responses: with the same hidden states, the final ones among them.
            read: which of these ``features`` are.
        """
        firsts = torch.tensor([max(r.prompt_length - 2, 0) for r in responses])
        counts = torch.tensor([len(r.features) - 1 for r in responses]) - firsts
        tokens = pad_sequence([r.tokens[1:-1] for r in responses], batch_first=True).to(device)
        states = pad_sequence([r.features for r in responses], batch_first=True).to(device).float()
        columns = torch.arange(int(counts.max()))
        valid = columns < counts[:, None]
        at = torch.where(valid, firsts[:, None] + columns, 0).to(device)
        tracked, rows = responses[0].tracked, torch.arange(len(at), device=device)[:, None]
        truth = feature_part(tracked, states, FINAL_STATE)[rows, at + 1]
        return cls(tokens, feature_part(tracked, states[:, :-1], read), truth, at, valid.to(device))


def unrolled(network: EagleNetwork, embeddings: Tensor, batch: Batch, steps: int) -> list[Tensor]:
    """Predicted states of each drafting step, [B, R, H]; step j means nothing in its first j - 1 columns.

    Args:
        network: of one layer.
        embeddings: [V, E] that it reads.
    """
    (layer,), rows = network.blocks, torch.arange(len(batch.tokens), device=batch.tokens.device)[:, None]
    embedded = embeddings[batch.tokens]
    inputs = network.read(embedded, network.fused(batch.features))
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    queries, keys, values = layer.attend_with(inputs, network.turns(positions)[None])
    turns, embedded = network.turns(batch.at), embedded[rows, batch.at]
    inputs, queries = inputs[rows, batch.at], queries[rows, batch.at]
    group, width = queries.shape[2] // keys.shape[2], queries.shape[3]
    past: list[tuple[Tensor, Tensor]] = []  # keys and values of the steps after the first
    predicted: list[Tensor] = []
    for step in range(1, steps + 1):
        if step > 1:
            before = torch.roll(predicted[-1], 1, dims=1)
            inputs = network.read(embedded, before.to(embedded.dtype))
            queries, *fresh = layer.attend_with(inputs, turns)
            past.append((fresh[0], fresh[1]))
        scaled = queries.unflatten(2, (-1, group)) * width**-0.5  # [B, R, kv, group, D]
        seen = positions <= (batch.at - (step - 1))[..., None]
        scores = torch.einsum("brkgd,bnkd->brkgn", scaled, keys).float()
        scores = scores.masked_fill(~seen[:, :, None, None], torch.finfo(torch.float32).min)
        # Above a node of depth step - 1 are one node of each depth from 1 on: the columns just before its own.
        above = [(torch.roll(k, step - i, dims=1), torch.roll(v, step - i, dims=1)) for i, (k, v) in enumerate(past, 2)]
        extra = [torch.einsum("brkgd,brkd->brkg", scaled, k).float()[..., None] for k, _ in above]
        weights = torch.cat([scores, *extra], dim=-1).softmax(-1).to(values.dtype)
        attended = torch.einsum("brkgn,bnkd->brkgd", weights[..., : len(positions)], values)
        for i, (_, v) in enumerate(above):
            attended = attended + weights[..., len(positions) + i, None] * v[:, :, :, None]
        predicted.append(network.predicted(layer.finish(inputs, attended.flatten(2))))
    return predicted


def loss(
    network: EagleNetwork,
    predicted: Sequence[Tensor],
    batch: Batch,
    weight: Tensor,
    bias: Tensor | None,
    *,
    decay: float,
    feature_weight: float,
) -> Tensor:
    """Cross-entropy with the target distribution over the draft vocabulary, plus smooth L1 between hidden states where
    the network predicts these.

    Args:
        predicted: of ``unrolled``.
        weight, bias: [D, H] and [D], the target's output layer for the draft vocabulary.
        decay: weight of each further step.
        feature_weight: of the second part.
    """
    with torch.no_grad():
        target = linear(batch.truth, weight, bias).float().softmax(-1)
    total = batch.truth.new_zeros(())
    for step, (valid, states, logits) in enumerate(_learned(network, predicted, batch, weight, bias)):
        part = cross_entropy(logits, target[valid])
        if network.predicts_features:
            part = part + feature_weight * smooth_l1_loss(states.float(), batch.truth[valid])
        total = total + decay**step * part
    return total


def _learned(
    network: EagleNetwork, predicted: Sequence[Tensor], batch: Batch, weight: Tensor, bias: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each drafting step [B, R] which positions count, and the predicted states and logits there."""
    for step, states in enumerate(predicted):
        valid = batch.valid.clone()
        valid[:, :step] = False
        if not valid.any():
            return
        learned, output = states[valid], network.lm_head
        read = network.readout(learned)
        yield valid, learned, (linear(read, weight, bias) if output is None else output.forward(read)).float()


@torch.no_grad()
def evaluate(network: EagleNetwork, frozen: Frozen, responses: Sequence[Response], size: int) -> Acceptance:
    """How often drafts along responses have the true token, given that those above are true.

    Takes the time of few training steps. Candidates are those of the draft vocabulary.

    Args:
        responses: of at least two tokens each.
        size: how many of them are looked at together.
    """
    right, tried = np.zeros((DEPTH, len(RANKS))), np.zeros((DEPTH, 1))
    for start in range(0, len(responses), size):
        part = responses[start : start + size]
        batch = Batch.of(part, frozen.weight.device, network.features)
        following = pad_sequence([r.tokens[2:] for r in part], batch_first=True).to(batch.at.device)
        truth = following.gather(1, batch.at)
        predicted = unrolled(network, frozen.embeddings, batch, DEPTH)
        for step, (valid, _, logits) in enumerate(_learned(network, predicted, batch, frozen.weight, frozen.bias)):
            best = frozen.vocabulary[logits.topk(min(RANKS[-1], logits.shape[-1])).indices]
            hits = best == truth[valid][:, None]
            right[step] += [int(hits[:, :rank].sum()) for rank in RANKS]
            tried[step] += len(hits)
    return tuple(map(tuple, (right / np.maximum(1, tried)).tolist()))


_WARM_UP = 0.03
"""Share of the steps in which the learning rate rises."""
_AVERAGED = 0.2
"""Share of the steps so far that the average is over, about."""
_FIRST_ALONE = 2 / 3
"""Share of a round's steps that train the first drafting step alone, of a network that predicts hidden states: such a
step costs half as much, and what it learns holds for further drafting steps, which read states of the same kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRecipe(Checked):
    """How a head is fitted.

    Attributes:
        batch: responses of one step.
        learning_rate: its highest; it rises linearly, and in the last round falls to 0 along a cosine.
        weight_decay: of matrices.
        clip: largest norm of a gradient.
        unroll: drafting steps that are trained; of a network that predicts hidden states, the first one alone in the
            first two thirds of a round.
        decay: weight of each further drafting step.
        feature_weight: of the distance between hidden states beside the cross-entropy, where a network predicts them.
        bf16: compute in bfloat16; the weights stay in float32.
        seed: of the order of the data and of the weights that start at random.

    Raises:
        ConfigError: a value is out of range.
    """

    batch: Count = option("Responses of one training step.", 8, metavar="N")
    learning_rate: LearningRate = option("The highest learning rate; it falls to 0.", 1e-3, metavar="R")
    weight_decay: float = 0.01
    clip: float = 1.0
    unroll: Count = option("Drafting steps that are trained.", 3, metavar="N")
    decay: float = 0.8
    feature_weight: float = 0.1
    bf16: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """The target's parts that a head stands on: all on one device, in float32.

    Attributes:
        embeddings: [V, H] token embeddings.
        vocabulary: [D] int64 ids of the tokens that are drafted.
        weight, bias: [D, H] and [D], its output layer for them.
    """

    embeddings: Tensor
    vocabulary: Tensor
    weight: Tensor
    bias: Tensor | None


@dataclass(slots=True, eq=False)
class Fit:
    """A fit under way, in one round or several.

    In the last round the learning rate falls to 0. Before it the rate stays high, so that the next round goes on
    learning, and an average over the last steps is as right as a network whose rate has fallen.

    Attributes:
        responses: to learn from in this round, at least one.
        steps: up to the end of this round; its time may end it before.
        key: identifies the training; a checkpoint of another one is refused.
        last: this round is.
        until: ``seconds`` up to the end of this round; it has one step at least.
        start, began: steps and seconds before this round.
        done: steps so far.
        seconds: that these took, and what was done between them.
        average: of the network, before the last round.
    """

    recipe: FitRecipe
    network: EagleNetwork
    frozen: Frozen
    responses: Sequence[Response]
    steps: int
    key: str
    last: bool = True
    until: float = math.inf
    start: int = 0
    began: float = 0.0
    done: int = 0
    seconds: float = 0.0
    average: EagleNetwork | None = None
    _optimizers: list[torch.optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        recipe, network, rate = self.recipe, self.network, self.recipe.learning_rate
        output = None if network.lm_head is None else network.lm_head.weight  # its rows are tokens: not for Muon
        matrices = [p for p in network.parameters() if p.ndim > 1 and p is not output]
        rest = [p for p in network.parameters() if p.ndim <= 1 or p is output]
        self._optimizers = [
            torch.optim.Muon(matrices, rate, recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    @property
    def best(self) -> EagleNetwork:
        """The network to use if the fit ended here."""
        return self.average or self.network

    def go_on(self, frozen: Frozen, responses: Sequence[Response], *, last: bool) -> None:
        """Begin the next round."""
        self.frozen, self.responses, self.last = frozen, responses, last
        self.start, self.began = self.done, self.seconds
        if last:
            self.average = None

    def _batch(self, step: int) -> Batch:
        """The responses of a step: neighbours in a random order of all of them."""
        size = min(self.recipe.batch, len(self.responses))
        epoch, at = divmod(step, len(self.responses) // size)
        generator = torch.Generator().manual_seed((self.recipe.seed * 1_000_003 + epoch) % 2**63)
        chosen = torch.randperm(len(self.responses), generator=generator)[at * size :][:size].tolist()
        return Batch.of([self.responses[i] for i in chosen], self.frozen.weight.device, self.network.features)

    def _batches(self) -> Iterator[Batch]:
        """Of the steps that are left; each is put together while the one before it is learned from."""
        with ThreadPoolExecutor(1) as reader:
            coming = reader.submit(self._batch, self.done)
            for step in range(self.done + 1, self.steps + 1):
                batch = coming.result()
                if step < self.steps:
                    coming = reader.submit(self._batch, step)
                yield batch

    @property
    def _position(self) -> float:
        """Share of the round that is done, by its steps or by its time."""
        by_time = (self.seconds - self.began) / max(1e-9, self.until - self.began)
        return max(by_time, (self.done - self.start) / (self.steps - self.start))

    def _rate(self, position: float) -> float:
        """Of the highest learning rate."""
        rise = 1.0 if self.start else min(1.0, (position + 1 / self.steps) / _WARM_UP)
        return rise * (0.5 * (1 + math.cos(math.pi * position)) if self.last else 1.0)

    @torch.no_grad()
    def _take_into_average(self) -> None:
        if self.average is None:
            self.average = deepcopy(self.network)
        share = 1 / max(1.0, min(self.done, _AVERAGED * self.done + 1))
        for mean, weight in zip(self.average.parameters(), self.network.parameters(), strict=True):
            mean.lerp_(weight, share)

    def run(self) -> Iterator[int]:
        """Do the steps that are left, one by one; gives out how many are done."""
        recipe, frozen = self.recipe, self.frozen
        kind = frozen.weight.device.type
        weight = frozen.weight.bfloat16() if recipe.bf16 else frozen.weight
        alone = _FIRST_ALONE if self.network.predicts_features else 0.0
        began = time.monotonic() - self.seconds
        self.network.train()
        for batch in self._batches():
            if (position := self._position) >= 1:
                return
            rate = recipe.learning_rate * self._rate(position)
            for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
                group["lr"] = rate
            with torch.autocast(kind, torch.bfloat16, enabled=recipe.bf16):
                drafting = 1 if position < alone else recipe.unroll
                predicted = unrolled(self.network, frozen.embeddings, batch, drafting)
                weights = {"decay": recipe.decay, "feature_weight": recipe.feature_weight}
                total = loss(self.network, predicted, batch, weight, frozen.bias, **weights)
            self.network.zero_grad(set_to_none=True)
            total.backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), recipe.clip)
            for optimizer in self._optimizers:
                optimizer.step()
            self.done, self.seconds = self.done + 1, time.monotonic() - began
            if not self.last:
                self._take_into_average()
            yield self.done

    def save(self, path: Path) -> None:
        """Write a checkpoint, in one piece.

        Raises:
            RunError: it cannot be written.
        """
        state = {
            "key": self.key,
            "done": self.done,
            "steps": self.steps,
            "until": self.until,
            "start": self.start,
            "began": self.began,
            "last": self.last,
            "average": self.average and self.average.state_dict(),
            "embedding_scale": self.network.config.embedding_scale,
            "seconds": self.seconds,
            "responses": [response.number for response in self.responses],
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        content = io.BytesIO()
        torch.save(state, content)
        write_whole(path, content.getbuffer())

    def resume(self, path: Path) -> bool:
        """Go on from a checkpoint, with those of its responses that are there; false where there is none.

        Raises:
            ConfigError: it is of another fit, or cannot be read.
        """
        if not path.exists():
            return False
        try:
            state = torch.load(check_regular(path), map_location=self.frozen.weight.device, weights_only=True)
            if state["key"] != self.key:
                raise ValueError("of another fit")
            self.network.load_state_dict(state["network"])
            self.network.config = replace(self.network.config, embedding_scale=state["embedding_scale"])
            if state["average"]:
                self.average = deepcopy(self.network)
                self.average.load_state_dict(state["average"])
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            learned = {*state["responses"]}  # a shard of some may have been damaged and removed
            self.responses = [response for response in self.responses if response.number in learned]
            if not self.responses:
                raise ValueError("none of its responses is there")
            self.done, self.steps, self.seconds = state["done"], state["steps"], state["seconds"]
            self.start, self.began = state["start"], state["began"]
            self.last, self.until = state["last"], state["until"]
        except (OSError, RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError):
            raise ConfigError(
                f"checkpoint {path} is damaged, or of a training with other responses or settings: repeat that one to "
                "finish it, or remove the file to start afresh"
            ) from None
        return True


def fast_in_bf16(target: LanguageModel) -> bool:
    """The target's device multiplies faster in bfloat16 than in float32."""
    return target.capabilities.device.startswith("cuda") or bool(torch.cpu._is_avx512_bf16_supported())
