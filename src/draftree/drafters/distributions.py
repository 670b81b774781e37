"""Draft distributions: logits to candidates, and how children are drawn from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..constraint import ConstraintState
from ..models.huggingface.torch_sampling import gumbel_noise, gumbel_noise_of, largest, warp_rows
from ..policies.base import Candidates
from ..request import Request
from ..sampling.noise import DRAFT_NOISE, derive_seed, stream_key
from ..scores import allowed_tokens
from ..tree import DraftDistribution, Drawing


class Drawn(NamedTuple):
    """The children of F nodes.

    Attributes:
        tokens: [F, K] int64 in draw order; entries past a node's count mean nothing.
        logprobs: [F, K] float32, what the drafter gives each of them (nats).
        distributions: [F] what they were drawn from; None where nothing was drawn.
    """

    tokens: Tensor
    logprobs: Tensor
    distributions: Sequence[DraftDistribution | None]


def candidates_of(blends: Sequence[Mapping[int, float]], width: int) -> Candidates:
    """Candidates after nodes whose distributions are over few tokens, for which lists are faster than tensors.

    Args:
        blends: [F] token -> probability, in descending order; what is missing from 1 is one outcome of the entropy.
        width: most candidates of a node.
    """
    tokens = [list(blend)[:width] + [0] * (width - len(blend)) for blend in blends]
    probabilities = [list(blend.values())[:width] + [0.0] * (width - len(blend)) for blend in blends]
    entropies = [_entropy(blend) for blend in blends]
    return Candidates(torch.tensor(tokens), torch.tensor(probabilities).log(), torch.tensor(entropies))


def _entropy(blend: Mapping[int, float]) -> float:
    rest = 1 - sum(blend.values())
    return -sum(p * math.log(p) for p in blend.values()) - (rest * math.log(rest) if rest > 0 else 0.0)


def split(found: Candidates) -> list[Candidates]:
    """Candidates after each of F nodes apart."""
    return [
        Candidates(
            found.tokens[f : f + 1],
            found.logprobs[f : f + 1],
            found.entropies[f : f + 1],
            None if found.origins is None else found.origins[f : f + 1],
            distributions=found.distributions[f : f + 1],
        )
        for f in range(len(found.tokens))
    ]


def joined(parts: Sequence[Candidates]) -> Candidates:
    """Candidates of several calls as those of one, in their order; origins are lost where a part has none."""
    width = max(part.tokens.shape[1] for part in parts)

    def column(name: str, fill: float = 0) -> Tensor:
        own = [getattr(part, name) for part in parts]
        return torch.cat([pad(x, (0, width - x.shape[1]), value=fill) for x in own])

    return Candidates(
        column("tokens"),
        column("logprobs", float("-inf")),
        torch.cat([part.entropies for part in parts]),
        None if any(part.origins is None for part in parts) else column("origins"),
        distributions=[q for part in parts for q in part.distributions],
    )


class Key(NamedTuple):
    """What the noise of a node's children depends on.

    Attributes:
        seed: the request's.
        position: of the step's root: no two steps share it.
        node: number in the step's tree while it grows, ROOT for the root.
    """

    seed: int
    position: int
    node: int


def draw(logits: Tensor, counts: Sequence[int], keys: Sequence[Key], drawing: Drawing) -> Tensor:
    """Draw children by the Gumbel-max trick.

    The k largest of logits + Gumbel noise, in order, are k draws without replacement (Yellott 1977; Kool et al., ICML
    2019, "Stochastic Beams and Where to Find Them"); with replacement every draw has noise of its own.

    Args:
        logits: [F, V] of the draft distributions.
        counts: [F] children of each node, at most as many as have positive probability.
        keys: [F].
        drawing: how.

    Returns:
        [F, max(counts)] int64 columns of ``logits`` in draw order; those beyond a node's count mean nothing.
    """
    width = max(counts)
    if not drawing.random:
        return logits.topk(width).indices
    if drawing is Drawing.WITHOUT_REPLACEMENT:
        return (logits + _noise(keys, [0] * len(keys), logits)).topk(width).indices
    if drawing is Drawing.TOP_AND_ONE:
        columns = logits.topk(width).indices
        last = torch.tensor(counts).to(logits.device, non_blocking=True)[:, None] - 1
        ranks = torch.arange(width, device=logits.device)
        top = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, columns, ranks < last)
        one = (logits.masked_fill(top, float("-inf")) + _noise(keys, [0] * len(keys), logits)).argmax(-1, keepdim=True)
        return torch.where(ranks < last, columns, one)
    pairs = [(f, i) for f, count in enumerate(counts) for i in range(count)]
    nodes, draws = torch.tensor(pairs).T.to(logits.device, non_blocking=True)
    noise = _noise([keys[f] for f, _ in pairs], [i for _, i in pairs], logits)
    columns = torch.zeros((len(counts), width), dtype=torch.int64, device=logits.device)
    columns[nodes, draws] = (logits[nodes] + noise).argmax(-1)
    return columns


def _noise(keys: Sequence[Key], draws: Sequence[int], logits: Tensor) -> Tensor:
    """[R, V] for each key and draw index."""
    pairs = zip(keys, draws, strict=True)
    streams = [stream_key(derive_seed(key.seed, DRAFT_NOISE, key.node, i), key.position) for key, i in pairs]
    return gumbel_noise(streams, logits.shape[-1], logits.device)


def _masked(logits: Tensor, states: Sequence[ConstraintState | None], entries: Sequence[Tensor] | None) -> Tensor:
    """[R, K] logits with -inf for tokens that a row's state does not allow, in new memory where there is any.

    Of a row none of whose entries are allowed everything stays: nothing is drafted there, and no token that is drawn
    there follows.

    Args:
        entries: [R] of [K] or less, the ids of the logits' entries; None: entry i is token i.
    """
    found = logits
    for row, state in enumerate(states):
        if state is None or (mask := state.mask) is None:
            continue
        if found is logits:
            found = logits.clone()
        own = allowed_tokens(mask, logits.shape[1]) if entries is None else state.allows(entries[row].cpu().numpy())
        allowed = torch.from_numpy(own)
        if bool(allowed.any()):
            found[row, : len(allowed)].masked_fill_(~allowed.to(logits.device, non_blocking=True), float("-inf"))
    return found


_FLOOR = torch.finfo(torch.float32).min
_CHUNK = 8
"""Nodes whose distributions are computed at once: bounds what is allocated beyond the logits."""


class DraftLogits:
    """Draft distributions of the nodes of one proposal; those scored last can have children drawn."""

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        self._scored: list[tuple[Request, int]] = []
        self._logits = torch.zeros(0)
        self._tokens: list[Tensor] = []  # for each scored node, the ids of its distribution's entries

    @torch.inference_mode()
    def candidates(
        self,
        scored: list[tuple[Request, int]],
        logits: Tensor,
        slots: Sequence[int],
        width: int,
        tokens: Sequence[Tensor] | None = None,
        *,
        depths: Sequence[int],
        states: Sequence[ConstraintState | None] = (),
    ) -> Candidates:
        """The most probable tokens after F nodes, in one transfer to the host.

        Args:
            scored: [F] the nodes, by request and number.
            logits: [W, K] on the model's device.
            slots: [F] where each node's are.
            width: most candidates of a node.
            depths: [F] of the nodes, 0 for a root.
            tokens: for each node [K] or less, the ids of the entries; those beyond are -inf. None: 0 to K - 1.
            states: [F] of the requests' constraints at the nodes; empty: there are none.
        """
        self._scored, parts, distributions = scored, [], []
        constrained, entries = any(states), list(tokens or ())
        self._tokens = entries if self._drawing.random else []
        params = [request.params for request, _ in scored]
        warpings = [p.warping for p in params]
        whole = list(slots) == list(range(len(logits)))  # nothing to pick out
        at = torch.tensor(slots).to(logits.device, non_blocking=True)
        lists = {id(ids): ids for ids in entries}
        names = [pad(ids, (0, logits.shape[-1] - ids.shape[0])) for ids in lists.values()]
        number = {key: i for i, key in enumerate(lists)}
        named = torch.stack(names)[[number[id(ids)] for ids in entries]] if len(names) > 1 else None
        named = names[0].expand(len(scored), -1) if len(names) == 1 else named
        coupled = self._drawing is Drawing.COUPLED and any(p.temperature for p in params)
        noise, heard = self._noise(scored, depths, logits, named) if coupled else (logits, [])
        for first in range(0, len(scored), _CHUNK):
            chunk = slice(first, first + _CHUNK)
            some = (logits[chunk] if whole else logits[at[chunk]]).float()
            if constrained:
                some = _masked(some, states[chunk], entries[chunk] or None)
            warped = warp_rows(some, warpings[chunk])
            if coupled:
                random = [f for f, p in enumerate(params[chunk]) if p.temperature]
                scale = torch.tensor([params[first + f].temperature for f in random])[:, None].to(warped.device)
                own = [heard[first + f] for f in random]
                shared = noise if own == list(range(len(noise))) else noise[own]
                if len(random) == len(warped):
                    warped.add_(shared).mul_(scale)
                else:
                    warped[random] = (warped[random] + shared).float() * scale
            elif self._drawing.random:
                warped = warped.log_softmax(-1)
                distributions.append(warped.clone())
            where = largest(warped, min(width, warped.shape[-1]))
            best, p = warped.gather(1, where), warped.softmax(-1)
            # log sum exp x = x - log p of any x, the largest for precision; entropy = log sum exp x - sum p x
            total = best[:, :1] - p.gather(1, where[:, :1]).log_()
            entropy = total - torch.linalg.vecdot(p, warped.clamp_(min=_FLOOR))[:, None]  # 0 log 0 = 0
            ids = where if named is None else named[chunk].gather(1, where)
            parts.append(torch.cat([ids.double(), (best - total).double(), entropy.double()], dim=1))
        if distributions:
            self._logits = torch.cat(distributions)
        found, logprobs, entropies = torch.cat(parts).cpu().tensor_split([(parts[0].shape[1] - 1) // 2, -1], dim=1)
        every = [self._distribution(f) for f in range(len(scored))] if distributions else []
        return Candidates(found.long(), logprobs.float(), entropies[:, 0].float(), distributions=every)

    def _distribution(self, f: int) -> DraftDistribution:
        """What follows the f-th of the nodes that were scored last."""
        logits = self._logits[f].cpu().numpy()
        if not self._tokens:
            return DraftDistribution(logits)
        return DraftDistribution(logits[: len(self._tokens[f])], self._tokens[f].cpu().numpy())

    def _noise(
        self,
        scored: list[tuple[Request, int]],
        depths: Sequence[int],
        logits: Tensor,
        named: Tensor | None,
    ) -> tuple[Tensor, list[int]]:
        """([S, K] the target's noise at each position that is scored, [F] which of them a node hears).

        Args:
            named: [F, K] int64 ids of the entries; None: entry i is token i.
        """
        heard = [(request, depth) for (request, _), depth in zip(scored, depths, strict=True)]
        first = {place: f for f, place in reversed(list(enumerate(heard)))}
        keys = [stream_key(request.seed, len(request.ids) + depth) for request, depth in first]
        if named is None:
            noise = gumbel_noise(keys, logits.shape[-1], logits.device)
        else:
            noise = gumbel_noise_of(keys, named[list(first.values())])
        number = {place: i for i, place in enumerate(first)}
        return noise.float(), [number[place] for place in heard]

    @torch.inference_mode()
    def draw(self, counts: Tensor) -> Drawn:
        """Draw ``counts`` ([F]) children for the nodes that were scored last; one transfer to the host."""
        wanted = counts.tolist()
        columns = torch.zeros((len(wanted), max(wanted)), dtype=torch.int64, device=self._logits.device)
        distributions: list[DraftDistribution | None] = [None] * len(wanted)
        random = [f for f, (request, _) in enumerate(self._scored) if request.params.temperature and wanted[f]]
        greedy = [f for f, (request, _) in enumerate(self._scored) if not request.params.temperature and wanted[f]]
        for group, drawing in ((random, self._drawing), (greedy, Drawing.TOP)):
            if group:
                keys = [Key(s.seed, len(s.ids), node) for s, node in (self._scored[f] for f in group)]
                drawn = draw(self._logits[group], [wanted[f] for f in group], keys, drawing)
                columns[group, : drawn.shape[1]] = drawn
        tokens = columns.clone()
        for f, ids in enumerate(self._tokens):
            tokens[f] = ids[columns[f].clamp(max=len(ids) - 1)]  # past a node's count a column may have no token
        for f in random:
            distributions[f] = self._distribution(f)
        found = torch.stack([tokens.double(), self._logits.gather(1, columns).double()]).cpu()
        return Drawn(found[0].long(), found[1].float(), distributions)
