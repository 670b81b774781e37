"""Fingerprints of weights: the same in every dtype, another for other weights."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from draftree.drafters.base import DraftSource
from draftree.drafters.provenance import provenance
from draftree.models.huggingface.inspection import fingerprint

from ..pairs import relative, source, target
from ..tiny import tiny


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_rounding_to_another_dtype_keeps_it(dtype: torch.dtype) -> None:
    weights = [*tiny().parameters(), torch.tensor([1e-30, -1e-30])]  # the last are 0 and -0 in half precision
    assert fingerprint(w.to(dtype) for w in weights) == fingerprint(weights)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str)
def test_it_is_a_digest_of_shapes_and_signs(dtype: torch.dtype) -> None:
    """Heads are found by it: it may never change."""
    numbers = [0.0, -0.0, 1e-300, -1e-300, math.inf, -math.inf, math.nan, -math.nan] if dtype.is_floating_point else []
    weight = torch.tensor([[1, -2, 3, -4, *numbers]], dtype=dtype)
    shape = f"(1, {weight.numel()})"
    signs = np.packbits(weight.signbit().flatten().numpy())
    assert fingerprint([weight]) == hashlib.sha256(shape.encode() + signs.tobytes()).hexdigest()[:16]


def test_other_weights_have_another_one_however_near_they_are() -> None:
    own = target().capabilities.fingerprint
    assert fingerprint(relative(noise=0.001).parameters()) != own
    assert fingerprint(tiny(seed=5).parameters()) != own
    assert fingerprint(tiny().parameters()) == own


def test_shapes_count() -> None:
    ones = torch.ones(4, 6)
    assert len({fingerprint([w]) for w in (ones, ones.reshape(6, 4), ones.flatten())} | {fingerprint([])}) == 4


def test_an_entry_beyond_the_sample_of_a_large_tensor_is_reached() -> None:
    """Entries are spaced over the whole tensor, not taken from its beginning."""
    one = torch.ones(100_000)
    other = one.clone()
    other[50_000:] = -1
    assert fingerprint([one]) != fingerprint([other])


def test_sources_go_by_their_models_and_without_one_by_their_names() -> None:
    model = target()
    joined: DraftSource = source("lookup+relative", model)
    assert provenance(model, joined, "").drafter_weights == fingerprint(relative().parameters())
    assert provenance(model, source("lookup", model), "").drafter_weights == "lookup"
