"""Draft distributions of models: logits to candidates, where the logits are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ...models.huggingface.torch_sampling import gumbel_noise, gumbel_noise_of, largest, warp_rows
from ...policies.base import Candidates, Numbers
from ...request import Request
from ...sampling.constraint import ConstraintState
from ...sampling.noise import stream_key
from ...scores import allowed_tokens
from ...tree import DraftDistribution, Drawing
from ..distributions import Drawn, draw_children


def _masked(logits: Tensor, states: Sequence[ConstraintState | None], entries: Sequence[Tensor]) -> Tensor:
    """[R, K] logits with -inf for tokens that a row's state does not allow, in new memory where there is any.

    Of a row none of whose entries are allowed everything stays: nothing is drafted there, and no token that is drawn
    there follows.

    Args:
        entries: [R] of [K] or less, the ids of the logits' entries; empty: entry i is token i.
    """
    found = logits
    for row, state in enumerate(states):
        if state is None or (mask := state.mask) is None:
            continue
        if found is logits:
            found = logits.clone()
        own = allowed_tokens(mask, logits.shape[1]) if not entries else state.allows(entries[row].cpu().numpy())
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
        self._distributions: list[DraftDistribution] = []

    @torch.inference_mode()
    def candidates(
        self,
        scored: list[tuple[Request, int]],
        logits: Tensor,
        slots: Sequence[int],
        width: int,
        entries: Sequence[Tensor] = (),
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
            entries: for each node [K] or less, the ids of the entries; those beyond are -inf. Empty: 0 to K - 1.
            states: [F] of the requests' constraints at the nodes; empty: there are none.
        """
        self._scored, parts, distributions = scored, [], []
        constrained = any(states)
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
                some = _masked(some, states[chunk], entries[chunk])
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
        self._distributions = []
        if distributions:
            rows = torch.cat(distributions).cpu().numpy()
            known = {key: own.cpu().numpy() for key, own in lists.items()}
            self._distributions = [DraftDistribution(row) for row in rows]
            if entries:
                pairs = zip(rows, (known[id(own)] for own in entries), strict=True)
                self._distributions = [DraftDistribution(row[: len(own)], own) for row, own in pairs]
        found = torch.cat(parts).cpu().numpy()
        tokens, logprobs, entropies = np.split(found, [(found.shape[1] - 1) // 2, found.shape[1] - 1], axis=1)
        return Candidates(
            tokens.astype(np.int64),
            logprobs.astype(np.float32),
            entropies[:, 0].astype(np.float32),
            distributions=self._distributions,
        )

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

    def draw(self, counts: Numbers) -> Drawn:
        """Draw ``counts`` ([F]) children for the nodes that were scored last."""
        return draw_children(self._scored, self._distributions, counts, self._drawing)
