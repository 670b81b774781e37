"""How one request is drafted for and verified, by name and made for a target; requests, and who observes them."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import Lock
from weakref import WeakSet, finalize

from ..config import DEFAULT_NODES, MAX_NODES, SamplingParams, check_fields, key_values, option, typed
from ..drafters.base import Drafter
from ..drafters.registry import load_drafter
from ..drafters.spec import DEFAULT_DRAFTER, NONE, DrafterSpec, learns, read_drafter
from ..errors import ConfigError, DraftreeWarning, call_named
from ..models.base import LanguageModel
from ..policies.base import GrowthPolicy, node_budget
from ..policies.methods import DEFAULT_METHOD, Method, find_policy, read_method
from ..request import Outcome, Request
from ..text.detokenizer import TextStream
from ..verify.base import Scheme
from ..verify.schemes import DEFAULT_SCHEME, SCHEMES, find_scheme, read_scheme

_RESERVED = 256
"""Most drafted nodes of a request that cache is reserved for."""
_KEPT = 32
"""Most speculations by name that an engine keeps; the least recently used one goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """How drafts are made and verified, parsed and checked before any model is loaded.

    Attributes:
        spec, policy, scheme: what ``drafter``, ``method`` with its ``settings``, and ``verification`` name.

    Raises:
        InputError: a name or a setting does not exist, or they do not go together.
    """

    drafter: str | DrafterSpec | LanguageModel = option(
        "What drafts: auto (the best that is there for the target), lookup, head, a draft head's folder, any model, "
        "none, self, MODULE:DRAFTER, your own, or several: A+B joins, A>B lets B verify A.",
        DEFAULT_DRAFTER,
        read=read_drafter,
    )
    method: str | Method | GrowthPolicy = option(
        "How trees grow: one that 'draftree methods' lists, or MODULE:POLICY, your own.",
        DEFAULT_METHOD,
        read=read_method,
    )
    settings: Mapping[str, float | str] | None = option(
        "A setting of the method; may be repeated.", name="--set", metavar="KEY=VALUE", read=key_values
    )
    nodes: int | None = option(
        f"Most drafted tokens in one step's tree; {DEFAULT_NODES} by default, {MAX_NODES} at most.", metavar="N"
    )
    verification: str | Scheme = option(
        "How trees are verified: a scheme that 'draftree methods' lists, or MODULE:SCHEME, your own.",
        DEFAULT_SCHEME,
        name="--verify",
        read=read_scheme,
    )
    candidates: str | None = option(
        "At a temperature, under match: coupled ranks drafts knowing the target's noise (the default), plain by the "
        "draft distribution alone, as the papers do; the text is the same.",
        metavar="KIND",
    )
    spec: DrafterSpec = field(init=False)
    policy: GrowthPolicy = field(init=False)
    scheme: Scheme = field(init=False)

    def __post_init__(self) -> None:
        check_fields(self)
        policy, scheme = find_policy(self.method, self.settings), find_scheme(self.verification, self.candidates)
        spec = DrafterSpec.parse(self.drafter)
        for name, value in (("spec", spec), ("policy", policy), ("scheme", scheme)):
            object.__setattr__(self, name, value)
        budget = self.budget
        if str(spec) != NONE:
            method = self.method if isinstance(self.method, str) else ""
            scheme.check(policy, budget, learns(spec), method and f"method {method}")

    @property
    def budget(self) -> int:
        """Most drafted tokens of one step's tree: ``nodes``, or the method's own bound."""
        return node_budget(self.policy, self.nodes)

    def within(self, nodes: int) -> SpeculationParams:
        """The same with a budget of at most so many nodes."""
        return self if self.budget <= nodes else replace(self, nodes=nodes)

    @property
    def key(self) -> Hashable:
        """The same for params that mean the same."""
        named = [x if isinstance(x, str) else id(x) for x in (self.method, self.verification)]
        drafter = self.drafter if isinstance(self.drafter, (str, DrafterSpec)) else id(self.drafter)
        settings = tuple(sorted((self.settings or {}).items()))
        return (str(drafter), *named, settings, self.nodes, self.candidates)

    def made_for(self, target: LanguageModel) -> Speculation:
        """Load the drafter, with a policy of its own unless ``method`` is one."""
        policy = find_policy(self.method, self.settings)
        drafter = load_drafter(self.spec, target, policy, learning=not self.scheme.sampler)
        return Speculation(drafter, self.nodes, self.scheme)


class Speculation:
    """What drafts for a request, within how many nodes, and what verifies. Requests may share it.

    Args:
        drafter: None: AR decoding.
        nodes: node budget of one request's tree at one step; the policy's own by default.

    Raises:
        ConfigError: the node budget is out of range, or the scheme cannot verify the drafter's trees.
    """

    @typed
    def __init__(
        self, drafter: Drafter | None = None, nodes: int | None = None, scheme: Scheme = SCHEMES[DEFAULT_SCHEME]
    ) -> None:
        self.drafter = drafter or Drafter()
        self.nodes, self.scheme = node_budget(self.drafter.policy, nodes), scheme
        if self.drafter.policy is not None:
            scheme.check(self.drafter.policy, self.nodes, self.drafter.learns)


_WARNED: WeakSet[LanguageModel] = WeakSet()
"""Targets without trees for which the warning was given."""


class Speculations:
    """The prepared speculations of one target; equal params share a drafter and what it has learned.

    Whatever drafter they choose, a target without trees (``Capabilities.no_trees``) decodes without drafts; a
    DraftreeWarning says so once.

    Args:
        prefixes: of ``Drafter.prepare``.
    """

    def __init__(self, target: LanguageModel, prefixes: int = 0) -> None:
        self._target, self._prefixes = target, prefixes
        self._made: OrderedDict[Hashable, tuple[SpeculationParams, Speculation]] = OrderedDict()
        self._prepared: dict[int, Scheme] = {}  # of drafters, by their ids, as long as they live
        self._nothing = Drafter() if target.capabilities.no_trees else None
        self._lock = Lock()

    def __contains__(self, choice: SpeculationParams | Speculation) -> bool:
        if self._nothing:
            return True
        if isinstance(choice, SpeculationParams):
            return choice.key in self._made
        return id(choice.drafter) in self._prepared

    def find(self, choice: SpeculationParams | Speculation) -> Speculation:
        """The prepared speculation of a choice; its drafter is loaded once.

        Raises:
            InputError: the drafter cannot be loaded for the target, or does not fit.
        """
        if self._nothing:
            self._warn(choice)
            return Speculation(self._nothing, scheme=choice.scheme)
        if isinstance(choice, Speculation):
            return self._prepared_for_target(choice)
        with self._lock:
            if choice.key in self._made:
                self._made.move_to_end(choice.key)
                return self._made[choice.key][1]
        speculation = self._prepared_for_target(choice.made_for(self._target))  # without the lock: others may be first
        with self._lock:
            _, first = self._made.setdefault(choice.key, (choice, speculation))  # another thread may have been sooner
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        return first

    def _warn(self, choice: SpeculationParams | Speculation) -> None:
        """Warn once per target without trees that drafts were wanted for."""
        can = self._target.capabilities
        policy = choice.drafter.policy if isinstance(choice, Speculation) else str(choice.spec) != NONE
        if policy and self._target not in _WARNED:
            _WARNED.add(self._target)
            warnings.warn(f"{can.name} decodes without drafts: {can.no_trees}", DraftreeWarning, stacklevel=4)

    def resolve(self, future: Future[Speculation], choice: SpeculationParams | Speculation) -> None:
        """Set a future to what ``find`` returns or raises."""
        try:
            future.set_result(self.find(choice))
        except Exception as error:  # noqa: BLE001 - raised again where the future is read
            future.set_exception(error)

    def _prepared_for_target(self, speculation: Speculation) -> Speculation:
        """``speculation``, whose drafter is prepared for the target, once.

        Raises:
            ConfigError: the drafter makes its children in another way for another speculation.
        """
        drafter, scheme = speculation.drafter, speculation.scheme
        if (before := self._prepared.get(id(drafter))) is not None:
            if (before.coupled, before.sampler) != (scheme.coupled, scheme.sampler):
                raise ConfigError(
                    f"drafter {drafter.name} drafts for {before.name} and {scheme.name}, whose trees "
                    "come out of the draft distribution in two ways: give each a drafter of its own"
                )
        else:
            call_named(f"drafter {drafter.name}: prepare", drafter.prepare, self._target, self._prefixes)
            self._prepared[id(drafter)] = scheme
            finalize(drafter, self._prepared.pop, id(drafter), None).atexit = False
        return speculation


class Observer:
    """An object that is notified of what an engine does; a subclass overrides what it observes."""

    def built(self, target: LanguageModel, speculation: Speculation) -> None:
        """An engine for this target has been built with this observer; requests that choose nothing else draft so."""

    def opened(self, request: EngineRequest) -> None:
        """A request has been prefilled and has its first token."""

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        """A step is over, with an outcome for each request; each ``request.ids`` already ends with the tokens taken."""

    def closed(self, request: EngineRequest) -> None:
        """A request is freed, even if its prefill failed; ``finish_reason`` is None when it was left early."""


class EngineRequest(Request):
    """A request with its speculation, and with observers that are notified of it alone."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        limit: int,
        eos_ids: frozenset[int],
        stream: TextStream,
        prediction: Sequence[int] = (),
        *,
        speculation: Speculation,
        observers: Sequence[Observer] = (),
    ) -> None:
        super().__init__(prompt_ids, params, limit, eos_ids, stream, prediction)
        self.speculation, self.observers = speculation, tuple(observers)

    @property
    def scored(self) -> int | None:
        """How many log-probabilities are wanted beside that of each token of its prompt; None: not even those.

        Of a prompt that was read to its end they are known.
        """
        return None if self.output_ids else self.params.prompt_logprobs

    def row_length(self, tokens: int) -> int:
        """Tokens that its row needs room for while its text has so many: those, and the nodes of a step.

        Of a large node budget only a part counts: most trees stay far below it, and the cache grows for one that does
        not.
        """
        return tokens + 1 + min(self.speculation.nodes, _RESERVED)
