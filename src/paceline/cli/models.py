"""Lists the models that have an alias: where each comes from and whether it is on this disk."""

from __future__ import annotations

import argparse

NAME = "models"
HELP = "list the models that have an alias"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def execute(args: argparse.Namespace) -> int:
    """Prints the table."""
    from paceline.cli.terminal import table
    from paceline.kv.layout import format_bytes
    from paceline.weights.catalog import list_models

    rows = [
        (
            status.entry.alias,
            status.entry.description,
            status.entry.license,
            format_bytes(status.entry.num_bytes),
            status.entry.source,
            "not yet: paceline pull " + status.entry.alias if status.path is None else str(status.path),
        )
        for status in list_models()
    ]
    print("\n".join(table(("alias", "model", "licence", "size", "from", "on disk"), rows, right=frozenset({3}))))
    print("\nA model can also be a .gguf file, a Hugging Face directory, or a hub id (owner/name).")
    return 0
