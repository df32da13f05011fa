"""Attention over pages in place, in plain torch: what ``executors.triton.paged_attention`` computes."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.config import PAGE_TOKENS
from paceline.executors.triton.attention_rows import AttentionRows


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionRows,
    *,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """softmax(q k^T) v of each row over what it sees, of the whole table with what it does not see hidden: no number
    decides about a shape."""
    tables = rows.page_table[rows.sequence_of_row.long()].long()
    at = torch.arange(tables.shape[1] * PAGE_TOKENS)
    distance = rows.positions[:, None] - at
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    group = q.shape[1] // keys.shape[1]

    def gathered(x: Tensor) -> Tensor:
        """[rows, heads, tokens, d]"""
        found = x[tables].transpose(1, 2).flatten(2, 3).double()
        return found.masked_fill(~seen[:, None, :, None], 0.0).repeat_interleave(group, dim=1)

    scores = torch.einsum("rhd,rhtd->rht", q.double(), gathered(keys))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None].expand(len(q), -1, 1)], dim=2)
    weights = torch.softmax(scores, dim=2)[:, :, : len(at)]
    return torch.einsum("rht,rhtd->rhd", weights, gathered(values)).to(q.dtype)
