"""What ``benchmarks.gpu`` measures in its own process: passes, drafted layers, attention and kernels."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.models.base import LanguageModel, Nodes, prefill
from draftree.models.huggingface.attention import attend_as_one
from draftree.models.huggingface.hf_loading import load_stock
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.masks import additive
from draftree.models.huggingface.pass_inputs import GRAIN
from draftree.models.huggingface.runner import RUNNERS, cuda_graph
from draftree.models.loading import load
from draftree.text.encoding import encode, user
from draftree.tree import ROOT, ancestors

from .serving import questions

SIZES = (1, 2, 4, 8, 16, 32, 64)
WARM = 3
"""Passes before those that count: one before the capture, the capture, and one replay."""


def _llama(hidden: int, layers: int, heads: int, key_heads: int, inner: int, vocab: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=inner,
        vocab_size=vocab,
    )


SHAPES = {"1b": _llama(2048, 16, 32, 8, 8192, 128256), "8b": _llama(4096, 32, 32, 8, 14336, 128256)}
SHAPES["135m"] = _llama(576, 30, 9, 3, 1536, 49152)
"""Of Llama 3.2 1B, Llama 3.1 8B and SmolLM2 135M."""
HEADS = {"SmolLM2-135M": (9, 3, 64), "Llama 3.1 8B": (32, 8, 128)}
"""Query heads, key heads, and the size of a head."""
TINY = _llama(32, 2, 4, 2, 64, 256)


@dataclass(frozen=True, slots=True)
class Options:
    """What the parts measure.

    Attributes:
        dtype: of all but ``passes``.
        context, repeats: of passes.
        prompts, tokens: of answers.
    """

    target: str
    drafter: str
    suite: str
    device: str
    dtype: str = "bfloat16"
    context: int = 512
    repeats: int = 20
    prompts: int = 13
    tokens: int = 64

    def model(self, runner: str, dtype: str = "float32") -> LanguageModel:
        """The target by a runner."""
        return load(self.target, backend="transformers", device=self.device, dtype=dtype, runner=runner)


def pass_times(model: LanguageModel, context: int, sizes: Sequence[int], repeats: int) -> list[float]:
    """Median milliseconds of a pass over n tokens behind so many, for each n."""
    row = prefill(model, [7] * context)
    medians = []
    for size in sizes:
        seconds = []
        for _ in range(WARM + repeats):
            _wait(model.capabilities.device)
            began = time.perf_counter()
            model.extend([row], [Nodes.chain([11] * size)])
            _wait(model.capabilities.device)
            seconds.append(time.perf_counter() - began)
            model.commit(row, [])
        medians.append(1e3 * statistics.median(seconds[WARM:]))
    model.close(row)
    return medians


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def bandwidth(device: str) -> float:
    """Bytes a second of the device's memory: the best of ten copies, read and written, of more than its caches hold."""
    size = 1 << (24 if device == "cpu" else 31)  # on a CPU nothing but a dry run measures it
    data, seconds = torch.zeros(size, dtype=torch.uint8, device=device), []
    for _ in range(10):
        _wait(device)
        began = time.perf_counter()
        data.clone()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return 2 * size / min(seconds)


def table(model: LanguageModel, options: Options, speed: float) -> str:
    """A line of a pass's milliseconds over each of ``SIZES`` tokens, T(32) over T(1), and the share of ``speed``."""
    times = pass_times(model, options.context, SIZES, options.repeats)
    share, made = model.capabilities.weight_bytes / speed / (times[0] / 1e3), getattr(model, "passes", "")
    return (
        f"{model.capabilities.runner:6} {' '.join(f'{t:7.2f}' for t in times)}   T(32)/T(1) "
        f"{times[SIZES.index(32)] / times[0]:.2f}, {share:.0%} of the memory bandwidth over one token ({made})"
    )


def passes(options: Options) -> Iterator[str]:
    """Passes of the target by each runner."""
    yield from _passes(options, options.model, "float32")


def shape(config: LlamaConfig) -> Callable[[Options], Iterator[str]]:
    """Passes of a model of random weights by each runner, and the memory that it takes."""

    def run(options: Options) -> Iterator[str]:
        with torch.device(options.device):
            stock: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))

        def made(runner: str, dtype: str) -> LanguageModel:
            return HFModel(stock, name=f"random {stock.num_parameters() / 1e9:.1f}B", runner=runner, self_test=False)

        yield from _passes(options, made, options.dtype)
        if options.device.startswith("cuda"):
            yield f"memory at most: {torch.cuda.max_memory_allocated(options.device) / 1e9:.1f} GB"

    return run


def _passes(options: Options, made: Callable[[str, str], LanguageModel], dtype: str) -> Iterator[str]:
    speed = bandwidth(options.device)
    if options.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(options.device)  # what was copied is gone
    yield f"memory: {speed / 1e9:.0f} GB/s"
    yield f"ms of a pass behind {options.context} tokens, {dtype}, over n = {', '.join(map(str, SIZES))}"
    for runner in RUNNERS:
        yield table(made(runner, dtype), options, speed)


def differing(models: Sequence[LanguageModel], texts: Sequence[str], tokens: int) -> tuple[int, int]:
    """Of the greedy answers of two models those that differ, and how many there are."""
    params = SamplingParams(max_tokens=tokens)
    answers = [
        [Engine(m).generate([encode(m.tokenizer, user(text))], params)[0].token_ids for text in texts] for m in models
    ]
    return sum(a != b for a, b in zip(*answers, strict=True)), len(texts)


@dataclass(frozen=True)
class Ties:
    """How passes over one token and over several differ, along greedy answers.

    Attributes:
        places: tokens of the answers.
        ties: where the two highest logits are closer than the logits of the two passes.
        choices: where the highest is another.
        difference: largest one between the logits of a place.
    """

    places: int
    ties: int
    choices: int
    difference: float


def near_ties(model: LanguageModel, texts: Sequence[str], tokens: int, width: int) -> Ties:
    """Feed greedy answers one token at a time, and ``width`` at a time, to one model."""
    engine, places, ties, choices, largest = Engine(model), 0, 0, 0, 0.0
    for text in texts:
        prompt = encode(model.tokenizer, user(text))
        answer = engine.generate([prompt], SamplingParams(max_tokens=tokens))[0].token_ids
        one, several = (_logits(model, prompt, answer, step) for step in (1, width))
        difference = (one - several).abs().amax(-1)
        best = one.topk(2).values
        places += len(answer)
        ties += int((best[:, 0] - best[:, 1] < difference).sum())
        choices += int((one.argmax(-1) != several.argmax(-1)).sum())
        largest = max(largest, float(difference.max()))
    return Ties(places, ties, choices, largest)


def _logits(model: LanguageModel, prompt: list[int], answer: list[int], step: int) -> Tensor:
    """[n, V] float32 logits after each token of an answer, ``step`` of them a pass."""
    row, found = prefill(model, prompt), []
    for first in range(0, len(answer), step):
        new = answer[first : first + step]
        found.append(torch.from_numpy(model.extend([row], [Nodes.chain(new)]).logits(range(len(new)))))
        model.commit(row, range(len(new)))
    model.close(row)
    return torch.cat(found)


def exactness(options: Options) -> Iterator[str]:
    """Greedy answers of both runners, and near-ties in 16 bits."""
    texts = questions(options.prompts, options.suite)
    different, of = differing([options.model(runner) for runner in RUNNERS], texts, options.tokens)
    yield f"{different} of {of} greedy answers differ between the runners, float32"
    for runner in RUNNERS:
        found = near_ties(options.model(runner, options.dtype), texts, options.tokens, 16)
        yield (
            f"{options.dtype}, {runner} passes over 1 and 16 tokens: {found.ties} near-ties in {found.places} places, "
            f"{found.choices} other choices; logits differ by up to {found.difference:.3g}"
        )


def attention(options: Options) -> Iterator[str]:
    """PyTorch's SDPA against the attention of passes, of one layer, over random trees."""
    dtype: torch.dtype = getattr(torch, options.dtype) if options.device.startswith("cuda") else torch.float32
    yield f"ms of one layer's attention, {dtype}, and the largest difference of what is found"
    for name, (heads, key_heads, size) in HEADS.items():
        for context in (options.context, 8 * options.context):
            slots = 1 << (context + SIZES[-1]).bit_length()
            for count in SIZES[::3]:
                noise = torch.Generator().manual_seed(count)
                held = slots + GRAIN  # as the cache gives a layer's keys and values: views of more
                shapes = [(1, h, n, size) for h, n in ((heads, count), (key_heads, held), (key_heads, held))]
                query, *kept = (torch.randn(s, generator=noise).to(options.device, dtype) for s in shapes)
                key, value = (storage.narrow(2, 0, slots) for storage in kept)
                mask = additive(_tree_mask(context, count, slots).to(options.device)[None, None], dtype)
                by_sdpa = partial(scaled_dot_product_attention, query, key, value, mask, enable_gqa=True)
                by_passes = partial(attend_as_one, query, key, value, mask, None)
                (sdpa, one), (own, other) = _timed(by_sdpa, options), _timed(by_passes, options)
                apart = float((one - other.transpose(1, 2)).abs().max())
                yield f"{name}, {count:2} behind {context:5}: SDPA {sdpa:.3f}, passes {own:.3f}; {apart:.0e}"


def _tree_mask(context: int, count: int, slots: int) -> Tensor:
    """[count, slots] bool of a random tree behind a text."""
    rng = np.random.default_rng(count)
    parents = [int(rng.integers(ROOT, node)) for node in range(count)]
    mask = torch.zeros(count, slots, dtype=torch.bool)
    mask[:, :context] = True
    mask[:, context : context + count] = torch.from_numpy(ancestors(parents)[0])
    return mask


@torch.inference_mode()
def _timed(attend: Callable[[], Tensor], options: Options) -> tuple[float, Tensor]:
    """Median milliseconds, by a graph where there are any, and what is found."""
    found, seconds, cuda = attend(), list[float](), options.device.startswith("cuda")
    again = cuda_graph(torch.cuda.graph_pool_handle(), torch.cuda.Stream(found.device), attend) if cuda else attend
    for _ in range(WARM + options.repeats):
        _wait(options.device)
        began = time.perf_counter()
        again()
        _wait(options.device)
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds[WARM:]), found


def compiled(options: Options) -> Iterator[str]:
    """Passes of the target where ``torch.compile`` fuses norms, feed-forward layers and rotary embeddings."""
    stock, tokenizer = load_stock(options.target, dtype=options.dtype, device=options.device)
    for module in stock.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.compile(dynamic=True)
    modeling: Any = sys.modules[type(stock).__module__]
    modeling.apply_rotary_pos_emb = torch.compile(modeling.apply_rotary_pos_emb, dynamic=True)
    model, began = HFModel(stock, tokenizer, runner="graph", self_test=False), time.perf_counter()
    pass_times(model, options.context, SIZES[:2], 1)
    yield f"{options.dtype}; compiled in {time.perf_counter() - began:.0f} s"
    yield table(model, options, bandwidth(options.device))


def kernels(options: Options) -> Iterator[str]:
    """What a pass of the target launches: how many kernels, and those that take longest on the device."""
    kind, where = ("CPU", "cpu") if options.device == "cpu" else ("CUDA", "device")
    for dtype in ("float32", options.dtype):
        model = options.model("graph", dtype)
        row = prefill(model, [7] * options.context)
        for size in (1, 16):
            for count in (WARM, options.repeats):
                with torch.profiler.profile() as profiled:
                    for _ in range(count):
                        model.extend([row], [Nodes.chain([11] * size)])
                        model.commit(row, [])
                    _wait(options.device)
            events = [event for event in profiled.key_averages() if event.device_type.name == kind]
            times = {event.key: getattr(event, f"self_{where}_time_total") / options.repeats for event in events}
            launched = sum(event.count for event in events) / options.repeats
            yield f"{dtype}, {size:2} tokens: {launched:.0f} kernels, {sum(times.values()) / 1e3:.2f} ms"
            for key in sorted(times, key=lambda k: -times[k])[:6]:
                yield f"    {times[key]:6.0f} us  {key[:100]}"
