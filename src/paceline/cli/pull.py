"""Downloads a model and checks it; does nothing when it is there already."""

from __future__ import annotations

import argparse
import sys

from paceline.cli.arguments import add_model_argument
from paceline.cli.session import fetch_model
from paceline.cli.terminal import dim

NAME = "pull"
HELP = "download a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL."""
    add_model_argument(parser)


def execute(args: argparse.Namespace) -> int:
    """Prints where the model lies, before that the terms of one that is not there yet."""
    from paceline.weights.catalog import CATALOG, verify_cached

    if (entry := CATALOG.get(args.model)) and verify_cached(args.model) is None:
        print(dim(f"{entry.description}. Licence: {entry.license}", sys.stderr), file=sys.stderr)
    print(fetch_model(args.model))
    return 0
