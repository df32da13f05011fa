"""Which layers of a model are unlike the others, where files say it with a period."""

from __future__ import annotations


def all_but_every(period: int, num_layers: int) -> tuple[bool, ...]:
    """A flag for each layer, False for every ``period``-th: layers ``period`` - 1, 2 ``period`` - 1, ..."""
    return tuple((layer + 1) % period != 0 for layer in range(num_layers))
