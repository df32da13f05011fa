"""Every error that a user of Paceline can cause.

PacelineError
├── ModelError                 something about the model that was asked for
│   ├── UnknownModelError      no alias, file or directory of that name
│   ├── DownloadError          a model could not be fetched or its hash differs
│   ├── OutputError            a model cannot be written to that place (names it and why)
│   ├── CheckpointError        a file is truncated, corrupt, or lacks a tensor (names the file and the tensor)
│   └── UnsupportedError       an architecture, tensor type or feature that is not built
├── RequestError               something about one request
│   ├── ParameterError         a field has an impossible value (names field, value and range)
│   ├── ContextLengthError     prompt and context do not fit (both numbers)
│   └── RequestTimeoutError    an answer took longer than the server lets it
├── CapacityError              the machine or the pool has no room
│   ├── KVCapacityError        one request needs more KV pages than exist (both numbers)
│   ├── MemoryBudgetError      weights and the smallest KV pool exceed the memory available
│   └── OverloadError          the waiting queue is full
├── EngineStoppedError         the engine met an error of its own and takes no requests until it starts again
├── CacheDirectoryError        the prefix cache cannot be kept in that directory (names it and why)
├── AddressError               the server cannot listen at that address (names it and why)
└── EndpointError              a server that is measured does not answer as it should (names it and what it said)
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of every error that a user can cause."""


class ModelError(PacelineError):
    """The model that was asked for cannot be used."""


class UnknownModelError(ModelError):
    """No alias, file or directory has that name."""


class DownloadError(ModelError):
    """A model could not be fetched, or what arrived is not what was expected."""


class CheckpointError(ModelError):
    """A model file is truncated, corrupt or incomplete."""

    def __init__(self, path: object, problem: str, *, tensor: str | None = None) -> None:
        self.path = str(path)
        self.tensor = tensor
        where = f"{path}: tensor {tensor!r}" if tensor is not None else f"{path}"
        super().__init__(f"{where}: {problem}")


class OutputError(ModelError):
    """A model cannot be written to the place that was given."""

    def __init__(self, path: object, problem: str) -> None:
        self.path = str(path)
        super().__init__(f"{path}: {problem}")


class UnsupportedError(ModelError):
    """The model asks for something that Paceline does not implement."""


class RequestError(PacelineError):
    """One request cannot be served as asked."""


class ParameterError(RequestError):
    """A field has a value outside its range."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field}={value!r} is not possible: {allowed}")


class ContextLengthError(RequestError):
    """The prompt does not fit the context."""

    def __init__(self, num_prompt_tokens: int, context_length: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.context_length = context_length
        super().__init__(
            f"the prompt has {num_prompt_tokens} tokens and the context holds {context_length}, "
            "of which one must be left for the answer: shorten the prompt"
        )


class RequestTimeoutError(RequestError):
    """An answer has not ended within the time that it was given."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        super().__init__(f"the answer has not ended within {limit_s:g} s: ask for fewer tokens, or try again later")


class CapacityError(PacelineError):
    """The machine or a pool has no room for what was asked."""


class KVCapacityError(CapacityError):
    """One request alone needs more key/value pages than the pool has."""

    def __init__(self, num_tokens: int, num_pool_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_pool_tokens = num_pool_tokens
        super().__init__(
            f"the request has reached {num_tokens} tokens and the whole KV pool holds {num_pool_tokens}: "
            "raise kv_memory_bytes or shorten the request"
        )


class MemoryBudgetError(CapacityError):
    """Weights, workspace and the smallest useful KV pool exceed the memory that is available."""


class OverloadError(CapacityError):
    """The waiting queue is full; try again later."""

    def __init__(self, num_waiting: int, max_queue: int, *, is_share: bool = False) -> None:
        self.num_waiting = num_waiting
        self.max_queue = max_queue
        whose = ("of this share ", "this share's part of ") if is_share else ("", "")
        super().__init__(
            f"{num_waiting} requests {whose[0]}wait and {whose[1]}the queue holds {max_queue}: "
            "try again later, or raise max_queue"
        )


class EngineStoppedError(PacelineError):
    """The engine met an error of its own, outside any request, and takes none until it starts again."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"the engine stopped: {cause!r}")
        self.__cause__ = cause


class CacheDirectoryError(PacelineError):
    """The prefix cache cannot be kept in the directory that was given."""

    def __init__(self, directory: object, problem: str) -> None:
        self.directory = str(directory)
        super().__init__(f"{directory}: cannot keep the prefix cache here: {problem}")


class AddressError(PacelineError):
    """The server cannot listen at the address that was given."""

    def __init__(self, host: str, port: int, problem: str) -> None:
        self.host = host
        self.port = port
        super().__init__(f"cannot listen at {host}, port {port}: {problem}")


class EndpointError(PacelineError):
    """A server that is measured does not answer as an OpenAI-compatible one does, or not at all."""

    def __init__(self, url: str, problem: str) -> None:
        self.url = url
        super().__init__(f"{url}: {problem}")
