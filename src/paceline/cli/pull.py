"""Downloads a model and checks it; does nothing when it is there already."""

from __future__ import annotations

import argparse

from paceline.cli.arguments import add_model_argument
from paceline.cli.session import fetch_model

NAME = "pull"
HELP = "download a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL."""
    add_model_argument(parser)


def execute(args: argparse.Namespace) -> int:
    """Prints where the model lies."""
    print(fetch_model(args.model))
    return 0
