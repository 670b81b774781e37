"""Drafts by draftree inside vLLM: its custom proposer, chains of any length (vLLM 0.32).

    VLLM_USE_V2_MODEL_RUNNER=0 vllm serve MODEL --speculative-config \\
        '{"method": "custom_class", "model": "examples.vllm_proposer.ChainProposer", "num_speculative_tokens": 8}'

vLLM verifies chains alone, and its proposers see the ids of rows but not the requests: no trees, no predictions. A
chain is as long as pays, by the rule of draftree's `auto`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftree.integrations.other_engines import Proposer

COST = 0.03
"""What a drafted token adds to a pass, over a pass of one token for each row: 0.02 for 8B on an H100; measure yours."""


class ChainProposer:
    """What vLLM builds from its configuration and asks after every step."""

    def __init__(self, vllm_config: Any) -> None:
        self._tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self._longest = int(vllm_config.model_config.max_model_len)
        self._rows: dict[int, Proposer] = {}

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        *_: Any,
        **__: Any,
    ) -> list[list[int]]:
        """Draft a chain for each row.

        Args:
            sampled_token_ids: [R] what each row gained in this step; nothing while its prompt is read.
            num_tokens_no_spec: [R] length of each row's text, these tokens included.
            token_ids_cpu: [R, L] the texts.

        Returns:
            [R] drafted tokens, none or more.
        """
        drafts = list[list[int]]()
        for row, gained in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            room = min(self._tokens, self._longest - length - 1)
            if not len(gained) or room < 1:
                drafts.append([])
                continue
            proposer, text = self._rows.setdefault(row, Proposer()), token_ids_cpu[row, :length].tolist()
            chain = proposer.propose(text, room, width=1, cost=COST)
            drafts.append(chain[0])
        return drafts
