"""What is found out about a model when it is loaded: its limits, why it cannot be given trees, and its fingerprint."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...errors import NoTreesError, UnsupportedModelError
from ...tree import Floats
from ..base import (
    DRAFTED,
    FINAL,
    PROMPT,
    Capabilities,
    FeatureSpec,
    LanguageModel,
    Nodes,
    check_finite,
    decoded,
    difference,
    prefill,
)
from ..heads.head_format import digest_of, spaced
from ..memory import free_memory
from ..protocols import LayerSizes
from . import attention


def fingerprint(weights: Iterable[Tensor]) -> str:
    """16 hexadecimal digits of SHA-256 over the shapes of the weights and the signs of evenly spaced entries.

    Rounding to another dtype keeps every sign, so the digest is the same in float32, bfloat16, float16 and float8, on
    every device and from every file format. Training changes some of a million signs.

    Args:
        weights: in a fixed order, as ``Module.parameters`` gives them.
    """

    def signs(weight: Tensor) -> tuple[tuple[int, ...], NDArray[np.bool_]]:
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight  # of all processes that share it
        some = whole.detach().reshape(-1)[spaced(whole.numel())]
        known = some.float() if some.element_size() == 1 else some  # torch tells no signs of float8
        return tuple(weight.shape), known.signbit().cpu().numpy()

    return digest_of(map(signs, weights))


_MASKED = ("sdpa", "eager", attention.NAME, attention.EAGER)
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_SLOT_POSITIONS = {"bloom", "mpt", "gpt_neo", "doge"}
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-5}
_HALF_TOLERANCE = 0.5
"""In bfloat16 SmolLM2's right passes differ by up to 0.22, and passes with wrong masks or positions by 1 and more."""
_SAME_STATES = 0.1
"""Of an output layer's logits of the same hidden states, in any dtype."""


_EXPERTS = ".experts"
"""Names of modules that hold a layer's routed experts end so; those that all tokens share have other names."""
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")
"""Settings of how many experts a token has."""
_MULTIPLIES_ALL = {"llama4_text"}
"""Types of models that multiply each token with all experts, and by zero what is not wanted."""


def computing(
    weights: Iterable[Tensor], device: str, experts: Collection[Tensor] = (), share: float = 1.0
) -> dict[str, Any]:
    """What makes passes of these weights by torch (``Capabilities``).

    Args:
        weights: those that some token is multiplied with.
        experts: the routed experts' among them, of which a token has a ``share``.
    """
    read, on_gpu = list(weights), device.startswith("cuda")
    chosen = set(experts)  # tensors are equal by identity here
    numbers, size = _amounts(weight for weight in read if weight not in chosen)
    of_experts = _amounts(weight for weight in read if weight in chosen)
    expert_numbers, expert_bytes = (round(share * amount) for amount in of_experts)
    return {
        "engine": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "tier": "torch-cuda" if on_gpu else "torch",
        "threads": 1 if on_gpu else torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name(device) if on_gpu else "",
        "weights": numbers + expert_numbers,
        "weight_bytes": size + expert_bytes,
        "expert_bytes": expert_bytes,
        "expert_share": share,
    }


def _amounts(weights: Iterable[Tensor]) -> tuple[int, int]:
    """Numbers and bytes."""
    listed = list(weights)
    return sum(weight.numel() for weight in listed), sum(weight.numel() * weight.element_size() for weight in listed)


def _experts(model: PreTrainedModel) -> tuple[list[Tensor], float]:
    """Weights of routed experts, and how many of a layer's experts a token has, over all of them."""
    config = model.config.get_text_config(decoder=True)
    layers = [module for name, module in model.named_modules() if name.endswith(_EXPERTS)]
    counts = [getattr(layer, "num_experts", 0) or len([*layer.children()]) for layer in layers]
    chosen = next((value for name in _CHOSEN if (value := getattr(config, name, None))), 0)
    chosen, count = max(chosen) if isinstance(chosen, Sequence) else chosen, max(counts, default=0)
    if not chosen or not count or config.model_type in _MULTIPLIES_ALL:
        return [], 1.0
    return [weight for layer in layers for weight in layer.parameters()], min(1.0, chosen / count)


def capabilities(model: PreTrainedModel, name: str, *, has_windows: bool = False) -> Capabilities:
    """What a model can do that is given draft trees.

    Args:
        has_windows: its passes have masks for its sliding layers.
    """
    config = model.config.get_text_config(decoder=True)
    layers, limits = getattr(config, "layer_types", None), [_context(config)]
    for field, kind in (
        ("sliding_window", "sliding_attention"),
        ("attention_chunk_size", "chunked_attention"),
    ):  # inside a window or chunk every mask is the full causal one, beyond it not
        window, is_masked = whole_number(config, field), has_windows and kind == "sliding_attention"
        if window and not is_masked and (layers is None or kind in layers):
            limits.append((window, f"its {field}, inside which trees are exact"))
    max_length, reason = min(limits)
    return replace(
        describe(model, name),
        max_length=max_length,
        max_length_reason=reason,
        slot_bytes=_slot_bytes(config, model.dtype),
        trees="yes: 4-D masks and depth positions are honoured (self-test passed)",
    )


def describe(model: PreTrainedModel, name: str, no_trees: str = "") -> Capabilities:
    """What is known of any model, whatever makes its passes.

    Args:
        no_trees: why it can be given no draft trees.
    """
    config = model.config.get_text_config(decoder=True)
    max_length, reason = _context(config)
    embeddings, output = (layer.weight for layer in (model.get_input_embeddings(), model.get_output_embeddings()))
    multiplied = (p for p in model.parameters() if p is not embeddings or p is output)
    return Capabilities(
        **computing(multiplied, str(model.device), *_experts(model)),
        name=name,
        architecture=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        max_length=max_length,
        max_length_reason=reason,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        eos_ids=_eos_ids(model),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        attention=config._attn_implementation or "",
        fingerprint=fingerprint(model.parameters()),
        no_trees=no_trees,
    )


def _slot_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes that one token takes in the cache; latent attention keeps one vector for all heads, and the rotated one."""
    if rank := getattr(config, "kv_lora_rank", None):
        return int(config.num_hidden_layers * (rank + config.qk_rope_head_dim)) * dtype.itemsize
    return 2 * sum(own.key_heads * own.head_size for own in layer_sizes(config)) * dtype.itemsize


def layer_sizes(config: Any) -> list[LayerSizes]:
    """Sizes of each layer that keeps keys and values of its own, as far as a model's config names them."""
    count = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    layers = getattr(config, "per_layer_config", None)  # those of Gemma 4 differ
    return [_sizes(config)] * count if layers is None else [_sizes(layers[number]) for number in range(count)]


def _sizes(layer: Any) -> LayerSizes:
    heads, hidden = layer.num_attention_heads, layer.hidden_size
    return LayerSizes(
        query_heads=heads,
        key_heads=getattr(layer, "num_key_value_heads", None) or heads,
        head_size=getattr(layer, "head_dim", None) or hidden // heads,
        feed_forward=getattr(layer, "intermediate_size", None) or 3 * hidden,
    )


def torch_dtype(can: Capabilities) -> torch.dtype:
    """Of a model's arithmetic."""
    dtype: torch.dtype = getattr(torch, can.dtype)
    return dtype


def free_bytes(device: str) -> int:
    """Memory of a device that nobody uses."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.startswith("cuda") else free_memory()


FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""What a model's code raises where it does not take what it is given."""
TREES = "verify draft trees"
OWN = "use transformers' own generate for it"


def refuse(model: PreTrainedModel, name: str) -> None:
    """Reject what is known not to work.

    Raises:
        NoTreesError: its rows cannot branch.
        UnsupportedModelError: it cannot be given draft trees, for another reason.
    """
    takes = inspect.signature(model.forward).parameters
    config = model.config.get_text_config(decoder=True)
    kind, used = config.model_type, config._attn_implementation
    why = linear = ""
    if model.config.is_encoder_decoder:
        why = "it is an encoder-decoder model: load a decoder-only one"
    elif any(weight.is_meta for weight in model.parameters()):
        why = "some of its weights are offloaded: load it without device_map, onto one device"
    elif getattr(model, "_is_stateful", False):
        linear = f"{kind} keeps a recurrent state, which cannot branch"
    elif unknown := set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS:
        linear = f"layers of type {', '.join(sorted(unknown))} cannot branch"
    elif kind in _SLOT_POSITIONS or getattr(config, "alibi", False):
        linear = f"attention of {kind} counts cache slots (ALiBi or a mask of its own)"
    elif used not in _MASKED:
        why = f"attention {used!r} ignores 4-D masks: load it with attn_implementation='sdpa'"
    elif missing := [p for p in ("position_ids", "past_key_values") if p not in takes]:
        why = f"its forward takes no {' and no '.join(missing)}: {OWN}"
    if linear:
        raise NoTreesError(name, TREES, linear, OWN)
    if why:
        raise UnsupportedModelError(f"{name} ({kind}) cannot {TREES}: {why}")


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    given = getattr(model.generation_config, "eos_token_id", None)
    if given is None:
        given = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    ids = [] if given is None else given if isinstance(given, Sequence) else [given]
    if not all(isinstance(token, int) for token in ids):
        raise UnsupportedModelError(
            f"eos_token_id is {given!r} in the model's config: it has to be a token id, or a list of them"
        )
    return frozenset(ids)


def _context(config: object) -> tuple[int, str]:
    """Most tokens of a sequence that the config allows, and what limits them."""
    return whole_number(config, "max_position_embeddings") or 2**31 - 1, "its context"


def whole_number(config: object, field: str) -> int:
    """A number of tokens in a config, 0 where it has none."""
    value = getattr(config, field, None) or 0
    if not isinstance(value, int) or value < 0:
        raise UnsupportedModelError(f"{field} is {value!r} in the model's config: it has to be a number of tokens")
    return value


@torch.inference_mode()
def self_test(model: LanguageModel) -> None:
    """Compare the logits of a tree of two branches, beside a row of another width, with one-token decoding.

    Before and after a commit that moves slots.

    Raises:
        NoTreesError: they differ, so the mask or the positions are not honoured.
    """
    vocab = model.capabilities.vocab_size
    prompt, (a, b, c, d) = [t % vocab for t in PROMPT], [t % vocab for t in DRAFTED]
    tree = Nodes([a, b, c, d], [-1, -1, 0, 1])  # root -> a -> c and root -> b -> d
    row = prefill(model, prompt)
    branches = [model.fork(row) for _ in range(2)]
    chains = [decoded(model, branch, tokens) for branch, tokens in zip(branches, ([a, c], [b, d]), strict=True)]
    beside = model.fork(row)
    logits = model.extend([row, beside], [tree, Nodes.chain([a])]).logits(range(5))
    pairs = [(logits[[0, 2]], chains[0]), (logits[[1, 3]], chains[1]), (logits[4:], chains[0][:1])]
    model.commit(row, [1, 3])
    pairs.append((decoded(model, row, [a]), decoded(model, branches[1], [a])))
    for opened in (row, *branches, beside):
        model.close(opened)
    check_equal(model, pairs, "tree and sequential")


def check_equal(model: LanguageModel, pairs: Iterable[tuple[Floats, Floats]], what: str) -> None:
    """Check that logits in pairs, found in two ways, are the same within rounding.

    Raises:
        NoTreesError: they are not.
    """
    can, pairs = model.capabilities, list(pairs)
    check_finite(can, np.concatenate([wanted for _, wanted in pairs]))
    worst = max(difference(x, y) for x, y in pairs)
    allowed = tolerance(torch_dtype(can))
    if not worst <= allowed:
        raise NoTreesError(
            can.name,
            TREES,
            f"{can.architecture} fails the tree self-test: {what} logits differ by {worst:.2g} standard deviations "
            f"({allowed:g} allowed), so it does not honour tree masks or positions",
            f"load it with attn_implementation='sdpa' or 'eager', or {OWN}",
        )


def tolerance(dtype: torch.dtype) -> float:
    """By how many standard deviations logits that should be equal may differ."""
    return _TOLERANCE.get(dtype, _HALF_TOLERANCE)


class HiddenStates:
    """Hidden states of a model's last pass, read by hooks, so that no modeling code is forked."""

    def __init__(self) -> None:
        self._hooked = FeatureSpec()
        self._last: dict[int, Tensor] = {}

    def add(self, wanted: FeatureSpec, model: PreTrainedModel, name: str) -> None:
        """Read these too from now on, of the passes of a model.

        Raises:
            UnsupportedModelError: there are no such layers, or they cannot be read, or ``FINAL`` ones are wanted of a
                model whose logits are not its output layer's of them.
        """
        if self._hooked.covers(wanted):
            return
        fresh = [layer for layer in dict.fromkeys(wanted.layers) if layer not in self._hooked.layers]
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        if beyond := [layer for layer in fresh if layer != FINAL and not 0 <= layer <= count]:
            raise UnsupportedModelError(
                f"{name} has {count} layers and no hidden state {beyond[0]}: use a draft head made for this model"
            )
        with ExitStack() as hooks:
            if why := self._hook(model, fresh, count, hooks) or self._flaw(model, fresh):
                raise UnsupportedModelError(
                    f"{name} ({type(model).__name__}) gives no hidden states to draft from: {why}: use drafter "
                    "'lookup' or a model"
                )
            hooks.pop_all()
        self._hooked |= wanted

    def read(self, wanted: FeatureSpec) -> Tensor:
        """[T, F] of all tokens of the last pass, on the model's device; they are let go."""
        states, self._last = self._last, {}
        return torch.cat([states[layer][0] for layer in wanted.layers], dim=-1)

    def _hook(self, model: PreTrainedModel, fresh: Sequence[int], count: int, hooks: ExitStack) -> str:
        """Keep hidden states from now on, until the hooks are removed; why that cannot be, or ""."""
        body = model.get_decoder()
        if body is None or body is model or model.get_output_embeddings() is None:
            return "its decoder and its output layer are not apart"
        layers = next((m for m in body.children() if isinstance(m, nn.ModuleList) and len(m) == count), nn.ModuleList())
        if not layers and set(fresh) != {FINAL}:
            return "its decoder layers are not in one list"

        def before(layer: int, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            self._keep(layer, args[0] if args else options["hidden_states"])

        def after(layer: int, module: nn.Module, args: object, output: Any) -> None:
            self._keep(layer, output if isinstance(output, Tensor) else output[0])

        for layer in fresh:
            if layer in (FINAL, count):
                read = body if layer == FINAL else layers[-1]
                hooks.callback(read.register_forward_hook(partial(after, layer)).remove)
            else:
                hook = layers[layer].register_forward_pre_hook(partial(before, layer), with_kwargs=True)
                hooks.callback(hook.remove)
        return ""

    def _keep(self, layer: int, states: Tensor) -> None:
        self._last[layer] = states.detach()  # what the model's owner trains keeps no graph here

    @torch.inference_mode()
    def _flaw(self, model: PreTrainedModel, fresh: Sequence[int]) -> str:
        """Why hidden states are not those that are wanted, found out by one short pass; "" where they are."""
        matrix = model.get_input_embeddings().weight
        size = matrix.shape[1] if isinstance(matrix, Tensor) else 0
        ids = torch.tensor([[11, 7, 5, 3]], device=model.device) % model.config.get_text_config(decoder=True).vocab_size
        logits = model(input_ids=ids, use_cache=False).logits
        for layer in fresh:
            if (shape := tuple(self._last[layer].shape)) != (*ids.shape, size) and layer != FINAL:
                return f"what layer {layer} reads has shape {list(shape)}"
        if FINAL not in fresh:
            return ""
        try:
            output = model.get_output_embeddings()(self._last[FINAL])
        except RuntimeError as error:
            return f"its output layer does not take them ({error})"
        allowed = min(_SAME_STATES, tolerance(model.dtype))
        if difference(output.float().cpu().numpy(), logits.float().cpu().numpy()) <= allowed:
            return ""
        return "its logits are not its output layer's of them (they are scaled or capped)"
