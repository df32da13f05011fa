"""Which numbers of a configuration are possible, whatever the file is."""

from __future__ import annotations

MAX_LAYERS = 10_000
"""More than any model has: a damaged file must not have us count to 2^60."""

SMALLEST, LARGEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
"""Positive numbers that f32, which kernels take them in, has with all digits: others would become 0 or infinite."""
