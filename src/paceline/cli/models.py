"""Lists the models that have an alias: where each comes from and whether it is on this disk. Or checks files."""

from __future__ import annotations

import argparse

NAME = "models"
HELP = "list the models that have an alias, or check whether files are whole"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--check."""
    parser.add_argument(
        "--check",
        nargs="+",
        metavar="MODEL",
        help="instead: read all bytes of these models and compare them with their checksums",
    )


def execute(args: argparse.Namespace) -> int:
    """Prints the table, or a line for each model that is whole."""
    if args.check:
        return _check(args.check)
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


def _check(models: list[str]) -> int:
    """Stops at the first that is damaged, or that nobody can say anything about."""
    from paceline.errors import UnsupportedError
    from paceline.weights.catalog import CATALOG, resolve_model, verify_pulled
    from paceline.weights.checkpoint import open_checkpoint
    from paceline.weights.checksums import verify_checksums

    for model in models:
        if model in CATALOG:
            print(f"{model}: whole, its SHA-256 is the catalog's ({verify_pulled(model)})")
            continue
        path = resolve_model(model, download=False)
        open_checkpoint(path)
        num_tensors = verify_checksums(path)
        if num_tensors is None:
            raise UnsupportedError(
                f"{path}: it opens, but has no checksums; only files that `paceline quantize` wrote can be checked"
            )
        print(f"{path}: whole, all {num_tensors} tensors have their checksums")
    return 0
