"""Block verification of a chain (Sun et al., "Block Verification Accelerates Speculative Decoding", ICLR 2025).

The drafted tokens are judged together, from the longest prefix down, so that a token that the target likes less than
the draft may be paid for by one that it likes more. In expectation no scheme for one drafted chain accepts more. Pure
functions of distributions and uniform draws, in float64.
"""

from __future__ import annotations

import torch

from ..tree import ROOT, DraftTree
from .match import Verdict
from .rejection import TargetLogits, UniformDraws, Visit, residual


def block(tree: DraftTree, target: TargetLogits, draws: UniformDraws) -> Verdict:
    """Accept a prefix of a drawn chain y_1..y_g.

    P_0 = 1, P_i = min(1, P_{i-1} p(y_i) / q(y_i)); h_g = P_g, and for i < g, with s_i = sum(max(P_i p - q, 0)) over the
    distributions that follow y_i: h_i = s_i / (s_i + 1 - P_i). For i from g down the prefix i is accepted with
    probability h_i; the next token is drawn from p for i = g, else from norm(max(P_i p - q, 0)). The length of the
    chain may depend on its own tokens: given y_1..y_i, at least i of them are accepted with probability P_i, wherever
    the chain ends.

    Args:
        tree: a chain with its distributions.
        target: its logits.
        draws: the chances of this step.
    """
    tokens: list[int] = tree.tokens.tolist()
    length, kept = len(tokens), 1.0
    chances, nexts = [], []
    for i, node in enumerate(range(ROOT, length)):
        logits = target(node, tokens[:i])
        if i == length:
            chances.append(kept)
            nexts.append(logits)
            break
        visit = Visit(logits, tokens[i : i + 1], tree.distributions.get(node), i, float(tree.entropies[i]))
        p, q = visit.p, visit.draft_logits.softmax(-1)
        surplus = float((kept * p - q).clamp(min=0).sum())
        chances.append(surplus / (surplus + (1 - kept)) if surplus else 0.0)
        nexts.append(residual(kept * p, q).log())
        ours, theirs = torch.stack([p[tokens[i]], q[tokens[i]]]).tolist()
        kept = min(1.0, kept * ours / theirs)
    accepted = next((i for i in range(length, 0, -1) if draws.accepts(chances[i])), 0)
    return Verdict(list(range(accepted)), [*tokens[:accepted], draws.draw(nexts[accepted], accepted)])
