"""What takes part in a benchmark, by name: ``METHOD[:KEY=VALUE]...`` and ``peer:NAME``. Loads nothing.

opt-tree    opt-tree:nodes=16:candidates=plain    static:verify=relaxed:when=both    plain    peer:hf-generate
dynamic-width:width_of=0.02:1,1:2,inf:7:depth=3
beams:width=4:drafter=head    peer:hf-beam-search:width=4
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..beams.params import BeamParams
from ..config import MAX_NODES, SamplingParams, named_settings
from ..draft.names import AUTO, learns, names_model, parts_of
from ..errors import ConfigError
from ..load import check_beam_drafter
from ..policies.base import GrowthPolicy, node_budget
from ..policies.methods import find_method
from ..verify.schemes import DEFAULT_SCHEME, Match, find_scheme
from .peers import PEERS, check_peer
from .wide import beam_params

PLAIN = "plain"
PEER = "peer:"
BEAMS = "beams"
PEER_BEAMS = ("width", "penalty", "early")
"""Settings of beams that a peer takes."""
_BETWEEN_NAMES = re.compile(r",(?!\s*(?:inf|[\d.]+(?:e[+-]?\d+)?)\s*:)", re.IGNORECASE)
"""A comma that no step of entropy (EDGE:VALUE) follows."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One contestant at one temperature.

    Attributes:
        label: its name in results; no other has it.
        method: a method's name, ``PLAIN``, ``BEAMS``, or "peer:" and a peer's name.
        drafter: a drafter's name; None for plain decoding and peers without a model of their own.
        temperature: of sampling.
        settings: of the method.
        nodes: node budget.
        verify: verification scheme.
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
        """A rival system."""
        return self.method.startswith(PEER)

    @property
    def peer(self) -> str:
        """The rival's name."""
        return self.method.removeprefix(PEER)

    @property
    def beams(self) -> BeamParams | None:
        """Its beams, ours or a peer's; None: it decodes one request."""
        if self.method == BEAMS or (self.is_peer and PEERS[self.peer].has_beams):
            return beam_params(self.label, self.settings)
        return None

    @property
    def draws_as_plain(self) -> bool:
        """Its tokens are to be those of plain decoding under the same seed."""
        if self.beams is not None:
            return False
        if self.temperature == 0:
            return not find_scheme(self.verify).lossy
        return not self.is_peer and isinstance(find_scheme(self.verify), Match)

    def policy(self) -> GrowthPolicy:
        """The growth policy of its method."""
        return find_method(self.method).policy(self.settings)


def split_names(text: str) -> list[str]:
    """Names of contestants that are written with commas between them; commas within steps of entropy do not count."""
    return [name.strip() for name in _BETWEEN_NAMES.split(text) if name.strip()]


def entries(
    methods: Sequence[str],
    drafters: Sequence[str],
    temperatures: Sequence[float],
    nodes: int | None = None,
    candidates: str | None = None,
) -> list[Entry]:
    """Plain decoding, every method with every drafter, and the peers, at every temperature.

    Args:
        methods, drafters, temperatures: names and numbers, as written.
        nodes: node budget of methods that name none; without it each has its own.
        candidates: of methods that name none and verify by match.

    Raises:
        ConfigError: a name is there twice, a setting or a drafter does not fit, or a peer lacks what it needs.
        UnknownNameError: there is no such method, peer or verification.
    """
    found: list[Entry] = []
    for temperature in temperatures:
        suffix = f" T={temperature:g}" if len(temperatures) > 1 else ""
        found.append(Entry(PLAIN + suffix, PLAIN, None, temperature))
        for text in methods:
            if text.startswith(PEER):
                found.append(_peer(text, text + suffix, drafters, temperature))
            elif text.partition(":")[0] == BEAMS:
                found.append(_beams(text, text + suffix, temperature))
            elif text != PLAIN:
                if not drafters:
                    raise ConfigError(f"method {text!r} has no drafter: name one in --drafters")
                for drafter in drafters:
                    own = text if len(drafters) == 1 else f"{text}@{drafter}"
                    found.append(_method(text, own + suffix, drafter, temperature, nodes, candidates))
    labels = [entry.label for entry in found]
    if double := next((label for label in labels if labels.count(label) > 1), None):
        raise ConfigError(f"{double!r} is there twice: name each method, drafter and temperature once")
    return found


def _method(
    text: str, label: str, drafter: str, temperature: float, nodes: int | None, candidates: str | None
) -> Entry:
    name, settings = named_settings(text)
    if (own := settings.pop("nodes", None)) is not None:
        try:
            nodes = int(own)
        except ValueError:
            nodes = 0
        if not 1 <= nodes <= MAX_NODES:
            raise ConfigError(f"method {text!r}: its nodes are {own!r}: use a whole number from 1 to {MAX_NODES}")
    verify = settings.pop("verify", DEFAULT_SCHEME)
    for key in [key for key in find_scheme(verify).settings if key in settings]:
        verify += f":{key}={settings.pop(key)}"
    if drafter == "none" or parts_of(drafter) == ("none",):
        raise ConfigError("drafter 'none' is plain decoding, which takes part anyway: leave it out")
    if "candidates" in settings or isinstance(find_scheme(verify), Match):
        candidates = settings.pop("candidates", candidates)
    else:
        candidates = None
    policy = find_method(name).policy(settings)
    entry = Entry(label, name, drafter, temperature, settings, node_budget(policy, nodes), verify, candidates)
    find_scheme(verify, candidates).check(policy, entry.nodes, learns(drafter))
    return entry


def _beams(text: str, label: str, temperature: float) -> Entry:
    _, settings = named_settings(text)
    drafter = settings.pop("drafter", AUTO)
    beam_params(text, settings).check(SamplingParams(temperature=temperature))
    check_beam_drafter(drafter, temperature > 0)
    return Entry(label, BEAMS, None if drafter == "none" else drafter, temperature, settings)


def _peer(text: str, label: str, drafters: Sequence[str], temperature: float) -> Entry:
    """A peer, with the model that drafts for it or the beams that it has."""
    name, settings = named_settings(text.removeprefix(PEER))
    check_peer(name)
    if PEERS[name].has_beams:
        if wrong := next((key for key in settings if key not in PEER_BEAMS), None):
            raise ConfigError(f"{PEER}{name} has no setting {wrong!r}: choose from {', '.join(PEER_BEAMS)}")
        beam_params(text, settings).check(SamplingParams(temperature=temperature))
    elif settings:
        raise ConfigError(f"{PEER}{name} has no settings: leave out {', '.join(settings)}")
    models = [d for d in drafters if names_model(d)] if PEERS[name].drafts_by_model else []
    if PEERS[name].drafts_by_model and not models:
        raise ConfigError(f"{text} needs a drafting model: name one in --drafters, or leave this peer out")
    return Entry(label, PEER + name, models[0] if models else None, temperature, settings)
