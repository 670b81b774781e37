"""A verification scheme of one's own: typical acceptance (Cai et al. 2024, *Medusa*), which changes texts.

draftree generate "Write a story." --method static --verify examples.typical_scheme:Typical --temperature 0.7
"""

import math

import numpy as np

import draftree


class Typical(draftree.NodeByNode):
    """Accepts the likeliest child of target probability above min(epsilon, delta exp(-H)), H the target's entropy."""

    name = "typical"
    summary = "lossy: a child that is typical of the target will do"
    lossy = True

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        self.epsilon, self.delta = epsilon, delta

    def decide(self, visit: draftree.Visit, draws: draftree.UniformDraws) -> int:
        p = visit.p
        entropy = -float(p @ np.log(np.maximum(p, 1e-300)))
        least = min(self.epsilon, self.delta * math.exp(-entropy))
        typical = [token for token in visit.children if p[token] > least]
        return max(typical, key=p.__getitem__) if typical else draws.draw(visit.logits, visit.depth)


if __name__ == "__main__":
    for scheme in ("match", Typical()):
        speculation = draftree.SpeculationParams(method="static", nodes=8, verification=scheme)
        engine = draftree.load_engine("smollm2", speculation)
        params = draftree.SamplingParams(max_tokens=60, temperature=0.7, seed=1)
        answer = engine.generate([draftree.user("Write a story about a lighthouse.")], params)[0]
        print(f"{answer.text}\nlossy: {answer.lossy}, {answer.stats.mal:.2f} tokens a pass of the target\n")
