"""What an engine is made of, and outlives it: so that another can take its place when it breaks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from paceline.config import EngineConfig
from paceline.engine.detokenize import TokenText
from paceline.engine.engine import Engine
from paceline.errors import CacheDirectoryError
from paceline.executors.base import Executor
from paceline.kv.store import PageStore


@dataclass(frozen=True)
class EngineParts:
    """``open_store`` opens the store of the prefix cache, None without one; ``use_speculation`` gives an engine that
    has not run yet its speculator."""

    executor: Executor
    tokenizer: TokenText
    config: EngineConfig
    use_speculation: Callable[[Engine], object]
    open_store: Callable[[], PageStore] | None = None

    def make(self) -> tuple[Engine, Callable[[], object]]:
        """An engine, and what is due once it takes no more steps. Raises what opening the store raises."""
        store = None if self.open_store is None else self.open_store()
        try:
            engine = Engine(self.executor, self.tokenizer, self.config, store=store)
            self.use_speculation(engine)
        except BaseException:
            if store is not None:
                store.close()
            raise
        return engine, (lambda: None) if store is None else store.close

    def make_again(self, broken: Engine) -> tuple[Engine, Callable[[], object]]:
        """As ``make``, to take the place of an engine that takes no more steps. A store that cannot be opened any more
        is done without, with a warning: answers need none."""
        try:
            engine, on_end = self.make()
        except CacheDirectoryError as error:
            warnings.warn(f"the engine starts again without the prefix cache on disk: {error}", stacklevel=2)
            without = EngineParts(self.executor, self.tokenizer, self.config, self.use_speculation)
            engine, on_end = without.make()
        engine.follow(broken)
        return engine, on_end
