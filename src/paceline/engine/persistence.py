"""Opens the part of ``kv_dir`` that belongs to a model and the way in which it is run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from paceline.config import EngineConfig
from paceline.errors import CacheDirectoryError
from paceline.kv.cache_directory import MEMO
from paceline.kv.identity import store_key
from paceline.kv.store import PageStore
from paceline.weights.model_hash import model_hash
from paceline.weights.raw import Checkpoint


def store_opener(
    checkpoint: Checkpoint, config: EngineConfig, *, executor: str, page_bytes: int
) -> Callable[[], PageStore] | None:
    """What opens the store of the prefix cache, as ``PageStore.open`` does; None where ``config`` has no ``kv_dir``.

    Raises ``CacheDirectoryError`` when there can be no such directory, and ``CheckpointError`` when a file of the model
    cannot be read.
    """
    if config.kv_dir is None:
        return None
    try:
        directory = Path(config.kv_dir).expanduser()
    except RuntimeError as error:
        raise CacheDirectoryError(config.kv_dir, str(error)) from error
    key = store_key(
        checkpoint.config.at_context(config.context_length or checkpoint.config.context_length),
        config,
        model_hash=model_hash(checkpoint.files, directory / MEMO),
        executor=executor,
    )
    return partial(PageStore.open, directory, key, page_bytes=page_bytes, max_bytes=config.kv_dir_bytes)
