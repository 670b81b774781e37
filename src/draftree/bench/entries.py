"""What takes part in a benchmark, by name: ``METHOD[:KEY=VALUE]...`` and ``peer:NAME``.

opt-tree    opt-tree:nodes=16:candidates=plain    static:verify=relaxed    my_module:MyPolicy:width=3
ar    peer:hf-generate
beams:width=4:drafter=my-draft.gguf    peer:hf-beam-search:width=4
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..beams.beam_engine import beam_drafter
from ..beams.forest import BeamParams
from ..config import MAX_NODES, SamplingParams
from ..drafters.registry import is_model
from ..drafters.spec import NONE, DrafterSpec, read_drafter
from ..engine.speculation import SpeculationParams
from ..errors import ConfigError, UnknownNameError
from ..importing import module_file
from ..models.base import LanguageModel
from ..policies.base import node_budget, read_number
from ..policies.methods import find_policy, read_method
from ..verify.base import Scheme
from ..verify.schemes import DEFAULT_SCHEME, Match, find_scheme, read_scheme

AR = "ar"
"""Autoregressive decoding, as results and command lines call it."""
PEER = "peer:"
BEAMS = "beams"
_SETTING = re.compile(r":(?=\s*\w+\s*=)")


LLAMA_CPP = "llama.cpp"
PEERS: Mapping[str, tuple[str, ...]] = {
    LLAMA_CPP: (),
    "hf-generate": (),
    "hf-prompt-lookup": (),
    "hf-assisted": (),
    "hf-beam-search": ("width",),
}
"""Peer -> its settings: AR decoding by llama.cpp; transformers': AR, prompt lookup, with a draft model, beams."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One contestant at one temperature.

    Attributes:
        label: its name in results; no other has it.
        method: a method's name (``read_method``), ``AR``, ``BEAMS``, or "peer:" and a peer's name.
        drafter: a drafter's name (``read_drafter``); None for AR decoding and peers without a model of their own.
        settings: of the method.
        nodes: node budget.
        verify: a scheme's name (``read_scheme``).
        candidates: of verification match (``CANDIDATES``); None: the scheme's own.
    """

    label: str
    method: str
    drafter: str | None
    temperature: float
    settings: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1
    verify: str = DEFAULT_SCHEME
    candidates: str | None = None

    @property
    def is_peer(self) -> bool:
        return self.method.startswith(PEER)

    @property
    def peer(self) -> str:
        return self.method.removeprefix(PEER)

    @property
    def beams(self) -> BeamParams | None:
        """Its beams, ours or a peer's; None: it decodes one request."""
        if self.method == BEAMS or self.peer == "hf-beam-search":
            return beam_params(self.label, self.settings)
        return None

    @property
    def draws_as_ar(self) -> bool:
        """Its tokens must be those of AR decoding under the same seed."""
        if self.beams is not None:
            return False
        if self.temperature == 0:
            return not self.scheme.lossy
        return not self.is_peer and isinstance(self.scheme, Match)

    @property
    def scheme(self) -> Scheme:
        """What verifies its trees; one of a user is made anew."""
        return find_scheme(read_scheme(self.verify))

    @property
    def files(self) -> list[str]:
        """Names of what it may read: its settings' values, and the modules that its names have imported."""
        drafter = DrafterSpec.parse(self.drafter or NONE)
        modules = map(module_file, (self.method, self.verify, *map(str, drafter.sources)))
        return [*self.settings.values(), *filter(None, modules)]

    def speculation(self, drafter: str | DrafterSpec | LanguageModel) -> SpeculationParams:
        """How it drafts and verifies.

        Raises:
            InputError: what it is made of does not go together.
        """
        return SpeculationParams(
            drafter=drafter,
            method=find_policy(read_method(self.method), self.settings),
            nodes=self.nodes,
            verification=read_scheme(self.verify),
            candidates=self.candidates,
        )


def split_names(text: str) -> list[str]:
    """Names of contestants that are written with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]


def named_settings(text: str, *, of_modules: bool = False) -> tuple[str, dict[str, str]]:
    """Read a name with its settings, written NAME:KEY=VALUE:KEY=VALUE.

    A value ends where the next KEY= begins, so it may hold colons; so may a name ``of_modules`` (``read_method``).

    Raises:
        ConfigError: something between the colons is not KEY=VALUE.
    """
    name, *pairs = _SETTING.split(text)
    if ":" in name and not of_modules:
        raise ConfigError(f"{text!r} has a setting without a name: write it as NAME:KEY=VALUE")
    settings = (pair.partition("=") for pair in pairs)
    return name.strip(), {key.strip(): value.strip() for key, _, value in settings}


def entries(
    methods: Sequence[str],
    drafters: Sequence[str],
    temperatures: Sequence[float],
    nodes: int | None = None,
    candidates: str | None = None,
) -> list[Entry]:
    """AR decoding, every method with every drafter, and the peers, at every temperature.

    Args:
        nodes: node budget of methods that name none; without it each has its own.
        candidates: of methods that name none and verify by match.

    Raises:
        ConfigError: a name is there twice, a setting or a drafter does not fit, or a peer lacks what it needs.
        UnknownNameError: there is no such method, peer or verification.
    """
    untempered = [Entry(AR, AR, None, 0.0)]
    for text in methods:
        if text.startswith(PEER):
            untempered.append(_peer(text, drafters))
        elif text.partition(":")[0] == BEAMS:
            untempered.append(_beams(text))
        elif text != AR:
            if not drafters:
                raise ConfigError(f"method {text!r} has no drafter: name one in --drafters")
            labels = [text] if len(drafters) == 1 else [f"{text}@{drafter}" for drafter in drafters]
            pairs = zip(labels, drafters, strict=True)
            untempered += [_method(text, label, drafter, nodes, candidates) for label, drafter in pairs]
    tempered: list[Entry] = []
    for temperature in temperatures:
        suffix = f" T={temperature:g}" if len(temperatures) > 1 else ""
        tempered += [replace(entry, label=entry.label + suffix, temperature=temperature) for entry in untempered]
    label, count = Counter(entry.label for entry in tempered).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"{label!r} is there twice: name each method, drafter and temperature once")
    for entry in tempered:
        params = SamplingParams(temperature=entry.temperature)
        if entry.beams is not None:
            entry.beams.check(params)
    return tempered


def _method(text: str, label: str, drafter: str, nodes: int | None, candidates: str | None) -> Entry:
    name, settings = named_settings(text, of_modules=True)
    if (own_nodes := settings.pop("nodes", None)) is not None:
        nodes = read_number(int, f"method {text!r}: nodes", own_nodes, f"use a whole number from 1 to {MAX_NODES}")
    verify = settings.pop("verify", DEFAULT_SCHEME)
    read = read_drafter(drafter)
    if str(DrafterSpec.parse(read)) == NONE:
        raise ConfigError("drafter 'none' is AR decoding ('ar'), which takes part anyway: leave it out")
    candidates = settings.pop("candidates", candidates if isinstance(find_scheme(read_scheme(verify)), Match) else None)
    nodes = node_budget(find_policy(read_method(name), settings), nodes)
    entry = Entry(label, name, drafter, 0.0, settings, nodes, verify, candidates)
    entry.speculation(read)  # checks that they go together
    return entry


def _beams(text: str) -> Entry:
    _, settings = named_settings(text)
    drafter = settings.pop("drafter", NONE)
    beam_drafter(read_drafter(drafter))
    return Entry(text, BEAMS, None if drafter == NONE else drafter, 0.0, settings)


def _peer(text: str, drafters: Sequence[str]) -> Entry:
    name, settings = named_settings(text.removeprefix(PEER))
    if name not in PEERS:
        raise UnknownNameError(f"no peer {name!r}: choose from {', '.join(PEER + peer for peer in PEERS)}")
    if wrong := next((key for key in settings if key not in PEERS[name]), None):
        raise ConfigError(f"{PEER}{name} has no setting {wrong!r}: choose from {', '.join(PEERS[name]) or 'none'}")
    models = [d for d in drafters if is_model(DrafterSpec.parse(read_drafter(d)))] if name == "hf-assisted" else [None]
    if not models:
        raise ConfigError(f"{text} needs a draft model: name one in --drafters, or leave this peer out")
    return Entry(text, PEER + name, models[0], 0.0, settings)


_READ: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "width": ("width", int),
    "draft": ("draft_width", int),
    "depth": ("depth", int),
    "threshold": ("threshold", float),
    "least": ("min_width", int),
    "single": ("single_cache", {"yes": True, "no": False}.__getitem__),
}
"""Setting -> field of ``BeamParams``, and how its text is read."""


def beam_params(text: str, settings: Mapping[str, str]) -> BeamParams:
    """The settings of a contestant ``text`` as one value.

    Raises:
        ConfigError: there is no such setting, or its value does not do.
    """
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in _READ:
            raise ConfigError(f"method {text!r} has no setting {key!r}: choose from {', '.join((*_READ, 'drafter'))}")
        name, read = _READ[key]
        try:
            values[name] = read(value)
        except (ValueError, KeyError):
            raise ConfigError(f"method {text!r}: {key} is {value!r}: see docs/bench.md for what it takes") from None
    return BeamParams(**values)
