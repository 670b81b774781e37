"""CUDA's captures, where something stands for CUDA: by the model's device, and nothing else is changed by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from draftree.models.huggingface.cache import TreeCache
from draftree.models.huggingface.runner import DevicePass, EagerRunner, GraphRunner, PassOutput


class Stream:
    """``torch.cuda.Stream``: one of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


class Cuda:
    """Stands for CUDA with two devices.

    Attributes:
        device: number of the current one.
        streams: the current one of each device.
        capturing: the stream that captures.
        replayed: on which devices graphs have been made again.
    """

    def __init__(self) -> None:
        self.device, self.streams = 0, [Stream(torch.device("cuda", number)) for number in range(2)]
        self.capturing: Stream | None = None
        self.replayed = list[int]()

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """``torch.cuda.device``."""
        before, self.device = self.device, device.index
        try:
            yield
        finally:
            self.device = before

    @contextmanager
    def under(self, stream: Stream) -> Iterator[None]:
        """``torch.cuda.stream``."""
        before = self.state
        self._choose(stream)
        try:
            yield
        finally:
            self.device, self.streams = before[0], [*before[1:]]

    @contextmanager
    def graph(
        self, graph: object, *, pool: object, capture_error_mode: str, stream: Stream | None = None
    ) -> Iterator[None]:
        """``torch.cuda.graph``, which leaves its stream the current one where the pass or the end of it fails."""
        before = self.state
        self.capturing = stream or Stream(torch.device("cuda", self.device))
        self._choose(self.capturing)
        try:
            yield
        finally:
            self.capturing = None
        self.device, self.streams = before[0], [*before[1:]]

    @property
    def state(self) -> tuple[int, Stream, Stream]:
        """The current device, and the current stream of each."""
        return self.device, self.streams[0], self.streams[1]

    def captures(self, device: int) -> bool:
        """What is launched on a device now goes to a graph."""
        return self.capturing is self.streams[device]

    def _choose(self, stream: Stream) -> None:
        self.device = stream.device.index
        self.streams[self.device] = stream

    def replay(self) -> None:
        """``torch.cuda.CUDAGraph.replay``."""
        self.replayed.append(self.device)


class Passes(EagerRunner):
    """Of a model on the second device."""

    device = torch.device("cuda:1")

    def make(self, step: DevicePass, cache: TreeCache) -> PassOutput:
        raise NotImplementedError


class Graph:
    """A ``torch.cuda.CUDAGraph``."""

    def __init__(self, of: Cuda) -> None:
        self.replay: Callable[[], None] = of.replay


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    for name, value in {
        "Stream": Stream,
        "device": cuda.on,
        "stream": cuda.under,
        "graph": cuda.graph,
        "CUDAGraph": lambda: Graph(cuda),
        "graph_pool_handle": object,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return cuda


def test_a_pass_is_captured_and_replayed_on_the_device_of_its_model(cuda: Cuda) -> None:
    """It was captured on the current device: what a model on another one launched went to no graph."""
    captures, before, output = GraphRunner(Passes())._captures, cuda.state, PassOutput(None, torch.zeros(1))
    captured = list[bool]()

    def make() -> PassOutput:
        captured.append(cuda.captures(1))
        return output

    assert captures is not None
    again = captures()(make)
    assert captured == [True] and cuda.state == before
    assert again() is output and again() is output
    assert cuda.replayed == [1, 1] and captured == [True] and cuda.state == before


def test_a_capture_that_fails_leaves_device_and_stream_as_they_were(cuda: Cuda) -> None:
    captures, before = GraphRunner(Passes())._captures, cuda.state

    def make() -> PassOutput:
        raise RuntimeError("operation not permitted")

    assert captures is not None
    with pytest.raises(RuntimeError, match="not permitted"):
        captures()(make)
    assert cuda.state == before
