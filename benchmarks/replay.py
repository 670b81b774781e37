"""How fast is each method by the costs of passes of a quiet machine, whatever else this one does?

    python -m benchmarks.replay [--target smollm2] [--methods auto,chain:depth=2,opt-tree:nodes=8,...]
                                [--drafters lookup,head,FILE] [--suites spec-bench] [--limit 39] [--max-tokens 80]
                                [--temperature 0] [--profile FILE] [--tier avx2] [--draft-ms MS]
                                [--batch 4]

Every method decodes every prompt, AR decoding among them, in turn. A pass of the target takes the seconds of its cost
profile: the kept one ('draftree profile'), or another machine's FILE; the policies see these seconds too. Drafting
takes what it takes here, or ``--draft-ms`` for each pass of what drafts (for each tree, where it has no model): then
other load on the machine is in no figure but "other", our own Python. What the target takes for prompts is left out.

Prints tokens a second over AR decoding (geometric means of ratios by prompt, 95% bootstrap intervals), and beside it
two bounds: the same trees drafted for nothing, and those trees with every node accepted, drafted for nothing. In a
batch of B the prompts are taken B by B. Answers that differ from AR decoding's are counted.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.progress import track

from draftree.bench.contestants import Models
from draftree.bench.entries import Entry, entries, split_names
from draftree.bench.run import encode_turns
from draftree.bench.suites import choose, load_suite
from draftree.bench.summary import markdown, ratio
from draftree.config import SamplingParams
from draftree.drafters.grow import TreeDrafter
from draftree.engine.engine import Engine
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import Observer, Speculation
from draftree.errors import ConfigError
from draftree.models.cost_profile import PROFILES, Identity, Profile, load_profile, processor
from draftree.models.measuring import SHORT, measure_and_keep
from draftree.models.model_files import DEFAULT_MODEL, gguf_path
from draftree.models.native.native_model import NativeModel
from draftree.request import Outcome, StepCost

from .commands import command_parser, one_line_errors

METHODS = ("auto", *(f"chain:depth={depth}" for depth in (1, 2, 4)), *(f"opt-tree:nodes={n}" for n in (4, 6, 8, 16)))


@dataclass(frozen=True, slots=True)
class Clock:
    """What a step takes.

    Attributes:
        target: the target's passes.
        draft: seconds of a pass that drafts; None: what drafting took.
    """

    target: Profile
    draft: float | None = None

    def cost(self, outcomes: Sequence[Outcome]) -> StepCost:
        """That of a step with these outcomes."""
        step, rows, nodes = outcomes[0].step, len(outcomes), sum(len(outcome.tree) for outcome in outcomes)
        context = sum(len(outcome.request.ids) - outcome.taken for outcome in outcomes) // rows
        verify = self.target.seconds(1 + nodes / rows, context, rows)
        draft = step.draft if self.draft is None else self.draft * (step.draft_passes or bool(nodes))
        share = draft / step.draft if step.draft else 0.0
        return replace(step, draft=draft, verify=verify, drafters=tuple(share * part for part in step.drafters))


class Clocked(TreeDrafter):
    """A drafter whose policy sees the clock's seconds."""

    def __init__(self, drafter: TreeDrafter, clock: Clock) -> None:
        super().__init__(drafter.policy, drafter.source, drafter.name)
        self._clock = clock

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        step = self._clock.cost(outcomes)
        super().observe([replace(outcome, step=step) for outcome in outcomes])


@dataclass(slots=True)
class Run:
    """Sums over the steps of one batch of prompts."""

    ids: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    nodes: int = 0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    @property
    def free(self) -> float:
        """Seconds, if drafting took none."""
        return self.verify + self.other

    @property
    def seconds(self) -> float:
        return self.draft + self.free

    def add(self, outcomes: Sequence[Outcome], cost: StepCost) -> None:
        """A step."""
        self.steps += len(outcomes)
        self.tokens += sum(outcome.taken for outcome in outcomes)
        self.nodes += sum(len(outcome.tree) for outcome in outcomes)
        self.draft += cost.draft
        self.verify += cost.verify
        self.other += cost.other


class Contestant(Observer):
    """An entry's engine, whose steps take the clock's seconds."""

    def __init__(self, entry: Entry, models: Models, clock: Clock, batch: int) -> None:
        self._clock, self._temperature, self._run = clock, entry.temperature, Run()
        speculation = None
        if entry.drafter is not None:
            made = entry.speculation(models.drafter(entry.drafter)).made_for(models.target)
            assert isinstance(made.drafter, TreeDrafter)  # noqa: S101 - of a name
            speculation = Speculation(Clocked(made.drafter, clock), made.nodes, made.scheme)
        self._engine = Engine(
            models.target,
            speculation,
            observers=[self],
            scheduling=SchedulerParams(rows=batch),
        )

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        self._run.add(outcomes, self._clock.cost(outcomes))

    def decode(self, prompts: Sequence[list[int]], max_tokens: int) -> Run:
        """Decode these together."""
        self._run = Run()
        params = [
            SamplingParams(max_tokens=max_tokens, temperature=self._temperature, seed=11 + i)
            for i in range(len(prompts))
        ]
        self._run.ids = [found.token_ids for found in self._engine.generate(prompts, params)]
        return self._run


HEADER = (
    "method",
    "over AR",
    "drafted for nothing",
    "all accepted",
    "MAL",
    "nodes",
    "draft",
    "verify",
    "other",
    "equal",
)


def row(label: str, runs: Sequence[Run], ar: Sequence[Run]) -> list[str]:
    """Figures of a method, ms a step."""
    base = [run.seconds / run.tokens for run in ar]
    total = Run()
    for run in runs:
        for name in ("tokens", "steps", "nodes", "draft", "verify", "other"):
            setattr(total, name, getattr(total, name) + getattr(run, name))
    return [
        label,
        ratio(base, [run.seconds / run.tokens for run in runs]).text(),
        ratio(base, [run.free / run.tokens for run in runs]).text(),
        ratio(base, [run.free / (run.steps + run.nodes) for run in runs]).text(),
        f"{total.tokens / total.steps:.2f}",
        f"{total.nodes / total.steps:.1f}",
        *(f"{1e3 * part / total.steps:.2f}" for part in (total.draft, total.verify, total.other)),
        f"{sum(run.ids == own.ids for run, own in zip(runs, ar, strict=True))}/{len(ar)}",
    ]


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Replay and print."""
    parser = command_parser("benchmarks.replay", __doc__)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--methods", default=",".join(METHODS), help="as draftree bench takes them")
    parser.add_argument("--drafters", default="lookup", help="with commas")
    parser.add_argument("--suites", default="spec-bench", help="with commas, or files")
    parser.add_argument("--limit", type=int, default=39, help="prompts of each suite, from its categories in turn")
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--profile", help="of another machine or moment: a file of 'draftree profile'")
    parser.add_argument("--tier", help="instruction set of the native engine; the profile's then")
    parser.add_argument("--draft-ms", type=float, help="a pass that drafts; measured by default")
    parser.add_argument("--batch", type=int, default=1, help="prompts that are decoded together")
    args = parser.parse_args(argv)
    contestants = entries(split_names(args.methods), split_names(args.drafters), [args.temperature])
    if wrong := next((e.label for e in contestants if e.is_peer or e.beams), None):
        raise ConfigError(f"--methods has {wrong!r}, whose passes have no costs here: name methods that draft")
    items = [item for suite in args.suites.split(",") for item in choose(load_suite(suite), limit=args.limit)]
    models = Models(args.target)
    if args.tier:
        models.target = NativeModel(gguf_path(args.target) or args.target, name=args.target, tier=args.tier)
    if args.profile:
        profile = replace(PROFILES.read(Path(args.profile)), identity=Identity.of(models.target))
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # the method auto finds it there
        profile.save()
    else:
        profile = load_profile(models.target) or measure_and_keep(models.target, SHORT)
    clock = Clock(profile, None if args.draft_ms is None else args.draft_ms / 1e3)
    made = {e.label: Contestant(e, models, clock, args.batch) for e in contestants}
    can, groups = models.target.capabilities, [items[i : i + args.batch] for i in range(0, len(items), args.batch)]
    print(
        f"{can.name}, {can.engine}, {can.tier}, {can.threads} threads, {processor()}; {args.profile or 'its profile'}"
    )
    runs: dict[str, list[Run]] = {label: [] for label in made}
    for group in track(groups, "decoding", transient=True):
        prompts = [encode_turns(models.target, item.turns[:1]) for item in group]
        for label, contestant in made.items():
            runs[label].append(contestant.decode(prompts, args.max_tokens))
    ar = runs[contestants[0].label]
    print(markdown(HEADER, [row(label, own, ar) for label, own in runs.items()]))


if __name__ == "__main__":
    main()
