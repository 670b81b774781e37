"""The kinds of heads that can be trained: what each reads of the target, where training starts, and its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..models.base import FINAL_STATE, FeatureSpec
from ..models.heads.eagle_network import EagleNetwork
from ..models.heads.head_folder import EAGLE, EAGLE3, KINDS, find_head
from ..models.heads.head_format import EagleConfig, HeadArrays, default_layers, tensor_shapes
from ..models.huggingface.cache import feature_part
from ..models.protocols import FeatureModel
from .eagle_fit import Batch, Frozen
from .responses import Response

_RIDGE_POSITIONS = 100_000
"""Positions that a regression looks at, at most."""
_RIDGE = 1e-3
"""Its penalty, as a share of the inputs' mean square."""
_AT_ONCE = 16
"""Responses that it looks at together."""
_SCALED_BY = 64
"""Responses whose hidden states set the scale of the embeddings."""
_ADDS = ("o_proj.weight", "down_proj.weight")
"""Ends of the names of the matrices whose results a layer adds to its input."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A kind of head that can be trained.

    Attributes:
        kind: as ``HeadFolder.kind``.
        about: what it is, for the model card.
        start: what it starts from where no other head is given, for the card.
        features: which hidden states of the target a new head reads.
        begin: a network to train from the start, on the device of ``Frozen``: as good as a linear map makes it.
    """

    kind: str
    about: str
    start: str
    features: Callable[[FeatureModel], FeatureSpec]
    begin: Callable[[Start], EagleNetwork]


@dataclass(frozen=True, slots=True)
class Start:
    """What a new head is made from.

    Attributes:
        vocabulary: [D] int64 ids of the tokens that it drafts.
        responses: to learn from.
        seed: of the weights that start at random.
        feed_forward: width of its MLP; None: the target's.
    """

    target: FeatureModel
    frozen: Frozen
    vocabulary: Tensor
    responses: Sequence[Response]
    seed: int
    feed_forward: int | None = None


def _begin_eagle(start: Start) -> EagleNetwork:
    frozen, responses = start.frozen, start.responses
    scale = _spread(responses) / float(frozen.embeddings.square().mean().sqrt())
    config = EagleConfig.like(start.target, start.feed_forward, embedding_scale=scale)
    network = new_eagle(config, start.seed).to(frozen.weight.device)
    regress(network, frozen, responses)
    return network


def new_eagle(config: EagleConfig, seed: int) -> EagleNetwork:
    """An untrained EAGLE-1 network with a norm before attention and a bias of ``fc``."""
    size = config.hidden_size
    given = {"fc.bias": torch.zeros(size), "layers.0.input_layernorm.weight": torch.ones(size)}
    return _fresh(config, given, FINAL_STATE, seed, fuses_states=False)


def _begin_eagle3(start: Start) -> EagleNetwork:
    """A state starts as what a linear map of the three hidden states tells of the final one, and its output layer as
    the target's: so all drafting steps read states of one kind from the start."""
    layers, weight = layers_read(start.target.layers), start.frozen.weight
    vocabulary = {"draft_vocab_size": len(start.vocabulary), "eagle_aux_hidden_state_layer_ids": layers}
    config = EagleConfig.like(start.target, start.feed_forward, **vocabulary)
    output = {"lm_head.weight": weight.detach().cpu().clone()}
    network = _fresh(config, output, FeatureSpec(layers), start.seed, fuses_states=True).to(weight.device)
    fuse(network, start.responses)
    return network


def _fresh(
    config: EagleConfig, given: Mapping[str, Tensor], features: FeatureSpec, seed: int, *, fuses_states: bool
) -> EagleNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ids = np.arange(config.draft_vocab_size or config.vocab_size)
        shapes = tensor_shapes(config, given, features, len(ids), fuses_states=fuses_states)
        weights = {n: given[n] if n in given else _begun(n, shape) for n, shape in shapes.items()}
    tensors = {name: weight.numpy() for name, weight in weights.items()}
    arrays = HeadArrays(config=config, features=features, ids=ids, fuses_states=fuses_states, tensors=tensors)
    network = EagleNetwork(arrays)
    return network.requires_grad_(True)


def is_trained(folder: Path, architecture: Architecture) -> bool:
    """Whether there is a head of this kind in a folder, whole or not.

    Raises:
        ConfigError: there is one of a kind that is not read.
    """
    head = find_head(folder)
    return head is not None and head.kind == architecture.kind


def read_trained(folder: Path, target: FeatureModel, architecture: Architecture) -> tuple[EagleNetwork, Tensor | None]:
    """A head to train further, and the [D] tokens that it drafts; None: any.

    Raises:
        ModelFileError: it cannot be read, or is not whole.
        ConfigError: it was made for another target, or is not one that can be trained.
    """
    head = find_head(folder)
    if head is None or head.kind != architecture.kind:
        raise ConfigError(f"no {KINDS[architecture.kind]} head in {folder}: give --init a folder of one")
    network, vocabulary = head.network(head.arrays_for(target))
    (first, *others) = network.layers
    own = network.embed_tokens is not None or first.q_norm is not None
    if others or own or not head.config.use_aux_hidden_state:
        raise ConfigError(
            f"draft head {folder} has several layers, norms of queries or embeddings of its own, or reads the "
            "final hidden state as EAGLE-3: give --init a head of one Llama layer, or leave it out"
        )
    return network.float().requires_grad_(True), None if network.predicts_features else vocabulary


def layers_read(layers: int) -> tuple[int, ...]:
    """Hidden states that an EAGLE-3 head for so many layers reads: the usual ones, or others that are distinct."""
    low, middle, high = default_layers(layers)
    if low < middle < high:
        return low, middle, high
    return (0, layers // 2, layers - 1) if layers > 2 else tuple(range(layers + 1))


def _begun(name: str, shape: tuple[int, ...]) -> Tensor:
    """Weights to train: norms of ones, matrices as ``nn.Linear`` draws them, and zeros where a layer adds to its
    input."""
    if len(shape) == 1:
        return torch.ones(shape)
    if name.endswith(_ADDS):
        return torch.zeros(shape)
    return nn.Linear(shape[1], shape[0], bias=False).weight.detach()


ARCHITECTURES = {
    "eagle": Architecture(
        EAGLE,
        """\
One decoder layer in the line of EAGLE (Li et al., ICML 2024) that reads the target's hidden states;
embeddings and output layer are the target's own and are not in the files.""",
        "ridge regression of the next hidden state",
        lambda target: FINAL_STATE,
        _begin_eagle,
    ),
    EAGLE3: Architecture(
        EAGLE3,
        """\
One decoder layer of EAGLE-3 (Li et al., 2025) that reads hidden states of several of the target's layers and
has an output layer of its own, in the format of speculators; embeddings are the target's own.""",
        "ridge regression of the final hidden state on those that it reads; the target's output layer",
        lambda target: FeatureSpec(layers_read(target.layers)),
        _begin_eagle3,
    ),
}
"""What can be trained, by name."""


def _spread(responses: Sequence[Response]) -> float:
    """Root mean square of final hidden states."""
    some = [feature_part(r.kept, r.features, FINAL_STATE).float().square().mean() for r in responses[:_SCALED_BY]]
    return float(torch.stack(some).mean().sqrt())


@torch.no_grad()
def regress(network: EagleNetwork, frozen: Frozen, responses: Sequence[Response]) -> None:
    """Set the input projection to the ridge regression of the next hidden state on its inputs; closed form.

    With the layer's own contribution at zero, the network then predicts as well as a linear map can.
    """

    def pairs(batch: Batch) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(batch.tokens), device=batch.tokens.device)[:, None]
        embedded = frozen.embeddings[batch.tokens[rows, batch.at]][batch.valid] * network.config.embedding_scale
        features = batch.features[rows, batch.at][batch.valid]
        return torch.cat([embedded, features, torch.ones_like(features[:, :1])], dim=1), batch.truth[batch.valid]

    solution = _ridge(_batches(responses, frozen.weight.device, FINAL_STATE), pairs, constants=1)
    assert network.fc is not None  # noqa: S101 - an untrained one has it
    network.fc.weight.copy_(solution[:-1].T)
    network.fc.bias.copy_(solution[-1])


@torch.no_grad()
def fuse(network: EagleNetwork, responses: Sequence[Response]) -> None:
    """Set ``fc`` to the ridge regression of the final hidden state on those of the same token that the network reads.

    The last norm gets the mean size of final states. With the layer's own contribution at zero, the network's output
    after a token is then the target's after the one before.
    """
    assert network.fc is not None and network.norm is not None  # noqa: S101 - an untrained one has both
    wide = network.sizes[1]

    def pairs(batch: Batch) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(batch.tokens), device=batch.tokens.device)[:, None]
        both = batch.features[rows, batch.at][batch.valid]
        return both[:, :wide], both[:, wide:]

    both = FeatureSpec(network.features.layers + FINAL_STATE.layers)
    network.fc.weight.copy_(_ridge(_batches(responses, network.fc.weight.device, both), pairs, constants=0).T)
    network.norm.weight.fill_(_spread(responses))


def _batches(responses: Sequence[Response], device: torch.device, read: FeatureSpec) -> Iterator[Batch]:
    for at in range(0, len(responses), _AT_ONCE):
        yield Batch.of(responses[at : at + _AT_ONCE], device, read)


def _ridge(batches: Iterator[Batch], pairs: Callable[[Batch], tuple[Tensor, Tensor]], *, constants: int) -> Tensor:
    """[I, H] the ridge regression of [n, H] on [n, I] by the pairs of each batch.

    Args:
        constants: last inputs that are constant, which the penalty leaves out.
    """
    square = product = torch.zeros((), dtype=torch.float64)
    seen = 0
    for batch in batches:
        inputs, truth = pairs(batch)
        square, product = square + (inputs.T @ inputs).double(), product + (inputs.T @ truth).double()
        seen += len(inputs)
        if seen >= _RIDGE_POSITIONS:
            break
    diagonal = square.diagonal()[: len(square) - constants]
    diagonal += _RIDGE * diagonal.mean()
    solution: Tensor = torch.linalg.solve(square, product)
    return solution.float()
