"""How often does a target go on to a drafted child? Each verification scheme at one node, measured beside its formula.

    python -m draftree.bench.acceptance [--laws 400] [--trials 4000] [--vocab 1000]

Target laws are Zipf's with slope 2 (logits -2 ln rank), draft laws the same logits with Gaussian noise of standard
deviation 1.2; both at temperature T. The measured column counts verdicts of the schemes themselves on children drawn
by the drafters' own code; the formulas are averaged over the same laws (``docs/algorithms.md``).
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

from ..config import SamplingParams
from ..drafters.distributions import Drawing, Key, draw
from ..sampling import Draws
from ..tree import ROOT, DraftDistribution, DraftTree
from ..verify.rejection import residual
from ..verify.schemes import SCHEMES, Scheme

SLOPE, NOISE = 2.0, 1.2
CASES = [(t, k) for t in (0.6, 1.0) for k in (2, 4)]
COMPARED = ("match", "multi-round-replacement", "multi-round", "top1-residual")
_BATCH = 100


def noisy_laws(count: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """[count, vocab] logits of the target and of the draft."""
    target = (-SLOPE * torch.arange(1, vocab + 1).log()).expand(count, -1)
    noise = torch.randn((count, vocab), generator=torch.Generator().manual_seed(seed))
    return target, target + NOISE * noise


def measure(scheme: Scheme, target: Tensor, draft: Tensor, temperature: float, width: int, trials: int) -> float:
    """Share of ``trials``, spread over the laws, in which one of ``width`` children of the root is accepted."""
    accepted = 0
    params = SamplingParams(temperature=temperature)
    for start in range(0, trials, _BATCH):
        seeds = range(start, min(start + _BATCH, trials))
        rows = [s % len(target) for s in seeds]
        q = draft[rows] / temperature
        children = draw(q, [width] * len(rows), [Key(s, 1, ROOT) for s in seeds], scheme.drawing)
        trees = [_star(tokens, DraftDistribution(law)) for tokens, law in zip(children, q, strict=True)]
        logits = target[rows][:, None].expand(-1, width + 1, -1)
        draws = Draws([params] * len(rows), seeds, [[0]] * len(rows))
        accepted += sum(bool(v.path) for v in scheme.verify(logits, trees, draws))
    return accepted / trials


def _star(tokens: Tensor, law: DraftDistribution) -> DraftTree:
    same = torch.ones_like(tokens)
    return DraftTree(tokens, same * ROOT, same, same * 0.0, same * 0.0, {ROOT: law})


def formula(drawing: Drawing, p: Tensor, q: Tensor, width: int, rng: torch.Generator) -> float:
    """Mean chance that one of ``width`` children is accepted.

    Args:
        drawing: of the scheme; the most probable children are matched.
        p, q: [R, V] laws of target and draft.
        width: k.
        rng: for draws without replacement, whose refused tokens are sampled.
    """
    if not drawing.random:
        return float(p.gather(1, q.topk(width).indices).sum(1).mean())
    if drawing is Drawing.TOP_AND_ONE:
        top = q.topk(width - 1).indices
        rest = q.scatter(1, top, 0)
        outside = torch.minimum(p.scatter(1, top, 0), rest / rest.sum(1, keepdim=True))
        return float((p.gather(1, top).sum(1) + outside.sum(1)).mean())
    missed = 0.0
    for left, drawn in zip(p, q, strict=True):
        chance = 1.0
        for _ in range(width):
            refused = (drawn - left).clamp(min=0)
            chance *= float(refused.sum())
            if not chance:
                break
            left = residual(left, drawn)
            if drawing is Drawing.WITHOUT_REPLACEMENT:
                drawn = drawn.index_fill(0, torch.multinomial(refused, 1, generator=rng), 0)
                drawn = drawn / drawn.sum()
        missed += chance
    return 1 - missed / len(p)


def main() -> None:
    """Print measured acceptance beside the formulas."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.acceptance", description=__doc__)
    parser.add_argument("--laws", type=int, default=400)
    parser.add_argument("--trials", type=int, default=4000)
    parser.add_argument("--vocab", type=int, default=1000)
    args = parser.parse_args()
    target, draft = noisy_laws(args.laws, args.vocab)
    rng = torch.Generator().manual_seed(1)
    print(f"{'T':>4} {'k':>2}  {'scheme':24} {'measured':>16}  formula")
    for temperature, width in CASES:
        p, q = ((logits.double() / temperature).softmax(-1) for logits in (target, draft))
        for name in COMPARED:
            scheme = SCHEMES[name]
            found = measure(scheme, target, draft, temperature, width, args.trials)
            error = math.sqrt(found * (1 - found) / args.trials)
            expected = formula(scheme.drawing, p, q, width, rng)
            print(f"{temperature:4} {width:2}  {name:24} {found:.3f} +- {error:.3f}  {expected:7.3f}", flush=True)


if __name__ == "__main__":
    main()
