"""The tag by which chat templates mark what the assistant says, for training; it changes no text."""

from __future__ import annotations

from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser


class GenerationTag(Extension):
    """``{% generation %} ... {% endgeneration %}`` stands for what is between."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
