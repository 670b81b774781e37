"""The kinds of heads that can be trained: what each reads of the target, where training starts, and its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..models.base import FINAL_STATE, FeatureSpec
from ..models.heads.eagle_network import EagleNetwork
from ..models.heads.head_folder import EAGLE, EAGLE3, find_head, head_in
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
    """

    kind: str
    about: str
    start: str

    def features(self, target: FeatureModel) -> FeatureSpec:
        """Which hidden states of the target a new head reads."""
        return FINAL_STATE if self.kind == EAGLE else FeatureSpec(layers_read(target.layers))

    def begin(
        self,
        target: FeatureModel,
        frozen: Frozen,
        vocabulary: Tensor,
        responses: Sequence[Response],
        seed: int,
        feed_forward: int | None = None,
    ) -> EagleNetwork:
        """A network to train from the start, on the device of ``frozen``: as good as a linear map makes it.

        The state of an EAGLE-3 head starts as what a linear map of the hidden states that it reads tells of the final
        one, and its output layer as the target's: so all drafting steps read states of one kind from the start.

        Args:
            vocabulary: [D] int64 ids of the tokens that it drafts.
            responses: to learn from.
            seed: of the weights that start at random.
            feed_forward: width of its MLP; None: the target's.
        """
        if self.kind == EAGLE:
            scale = _spread(responses) / float(frozen.embeddings.square().mean().sqrt())
            network = new_eagle(EagleConfig.like(target, feed_forward, embedding_scale=scale), seed)
        else:
            features = self.features(target)
            ids = {"draft_vocab_size": len(vocabulary), "eagle_aux_hidden_state_layer_ids": features.layers}
            output = {"lm_head.weight": frozen.weight.detach().cpu().clone()}
            config = EagleConfig.like(target, feed_forward, **ids)
            network = _fresh(config, output, features, seed, fuses_states=True)
        network = network.to(frozen.weight.device)
        regress(network, frozen, responses)
        return network


def new_eagle(config: EagleConfig, seed: int) -> EagleNetwork:
    """An untrained EAGLE-1 network with a norm before attention and a bias of ``fc``."""
    size = config.hidden_size
    given = {"fc.bias": torch.zeros(size), "layers.0.input_layernorm.weight": torch.ones(size)}
    return _fresh(config, given, FINAL_STATE, seed, fuses_states=False)


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


def read_trained(folder: Path, target: FeatureModel) -> tuple[EagleNetwork, Tensor | None]:
    """A head to train further, and the [D] tokens that it drafts; None: any.

    Args:
        folder: one that ``is_trained``.

    Raises:
        ModelFileError: it cannot be read, or is not whole.
        ConfigError: it was made for another target, or is not one that can be trained.
    """
    head = head_in(folder)
    network, vocabulary = head.network(head.arrays_for(target))
    (first, *further_layers) = network.layers
    differs = network.embed_tokens is not None or first.q_norm is not None
    if further_layers or differs or not head.config.use_aux_hidden_state:
        raise ConfigError(
            f"draft head {folder} has several layers, norms of queries or embeddings of its own, or reads the "
            "final hidden state as EAGLE-3: give --init a head of one Llama layer, or leave it out"
        )
    return network.float().requires_grad_(True), vocabulary


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
    ),
    EAGLE3: Architecture(
        EAGLE3,
        """\
One decoder layer of EAGLE-3 (Li et al., 2025) that reads hidden states of several of the target's layers and
has an output layer of its own, in the format of speculators; embeddings are the target's own.""",
        "ridge regression of the final hidden state on those that it reads; the target's output layer",
    ),
}
"""What can be trained, by name."""


def _spread(responses: Sequence[Response]) -> float:
    """Root mean square of final hidden states."""
    squares = [feature_part(r.tracked, r.features, FINAL_STATE).float().square().mean() for r in responses[:_SCALED_BY]]
    return float(torch.stack(squares).mean().sqrt())


@torch.no_grad()
def regress(network: EagleNetwork, frozen: Frozen, responses: Sequence[Response]) -> None:
    """Set ``fc`` to a ridge regression; closed form.

    That of an EAGLE-1 network is of the next hidden state on its inputs. That of an EAGLE-3 network is of the final
    hidden state on those of the same token that the network reads; its last norm gets the mean size of final states.
    With the layer's own contribution at zero, the network then predicts as well as a linear map can.
    """
    device, size, predicts = frozen.weight.device, frozen.weight.shape[1], network.predicts_features
    read = network.features if predicts else FeatureSpec(network.features.layers + FINAL_STATE.layers)
    square = product = torch.zeros((), dtype=torch.float64)
    seen = 0
    for start in range(0, len(responses), _AT_ONCE):
        batch = Batch.of(responses[start : start + _AT_ONCE], device, read)
        rows = torch.arange(len(batch.tokens), device=device)[:, None]
        states = batch.features[rows, batch.at][batch.valid]
        inputs, truth = states[:, :-size], states[:, -size:]
        if predicts:
            embedded = frozen.embeddings[batch.tokens[rows, batch.at]][batch.valid] * network.config.embedding_scale
            inputs, truth = torch.cat([embedded, states, torch.ones_like(states[:, :1])], 1), batch.truth[batch.valid]
        square, product = square + (inputs.T @ inputs).double(), product + (inputs.T @ truth).double()
        seen += len(inputs)
        if seen >= _RIDGE_POSITIONS:
            break
    diagonal = square.diagonal()[: len(square) - predicts]  # the constant is not penalised
    diagonal += _RIDGE * diagonal.mean()
    solution: Tensor = torch.linalg.solve(square, product)
    assert network.fc is not None  # noqa: S101 - an untrained one has it
    network.fc.weight.copy_(solution[: network.fc.in_features].T)
    if predicts:
        network.fc.bias.copy_(solution[-1])
    elif network.norm is not None:
        network.norm.weight.fill_(_spread(responses))
