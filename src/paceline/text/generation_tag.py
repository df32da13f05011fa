"""The ``{% generation %}`` tag, by which Transformers marks what the assistant said; here it changes nothing.

A module of its own because it needs jinja at import, which takes 0.06 s.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationTag(Extension):
    """Puts the body of the tag in its place."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements up to ``{% endgeneration %}``."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
