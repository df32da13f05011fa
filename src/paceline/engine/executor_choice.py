"""Which executor runs a model, on which device, and how it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from paceline.config import EngineConfig, Machine
from paceline.engine.memory import torch_weight_bytes, weight_bytes
from paceline.errors import ParameterError, UnsupportedError
from paceline.executors.base import Executor
from paceline.weights.raw import Checkpoint

if TYPE_CHECKING:
    from paceline.executors.torch.executor import TorchExecutor

ExecutorName = Literal["native", "torch", "reference"]
MAX_REFERENCE_PAGES = 64


@dataclass(frozen=True)
class ExecutorChoice:
    """An executor by name. ``device`` is "cpu", or for torch "cuda" or "cuda:N".

    Raises ``ParameterError`` for names that do not exist, and for torch where PyTorch or the device is not there.
    """

    name: ExecutorName = "native"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.name not in get_args(ExecutorName):
            raise ParameterError("executor", self.name, f"one of {', '.join(get_args(ExecutorName))}")
        if self.name == "torch":
            _torch_executor().check_device(self.device)
        elif self.device != "cpu":
            raise ParameterError("device", self.device, f"cpu with executor {self.name}; torch has others")

    @property
    def key(self) -> str:
        """The name under which its pages are kept on disk: those of others have other bits. Those of torch also hang on
        its version and on the instruction set that its libraries choose."""
        if self.name != "torch":
            return self.name
        return f"torch {self.device.partition(':')[0]} {_torch_executor().version()}"

    def check(self, config: EngineConfig) -> None:
        """Raises ``ParameterError`` for what ``config`` asks and this executor cannot have."""
        if self.name == "torch" and config.isa is not None:
            raise ParameterError("isa", config.isa, "None with executor torch: PyTorch chooses its own kernels")
        if self.device != "cpu" and config.kv_dir is not None:
            raise ParameterError("kv_dir", config.kv_dir, f"None on {self.device}: pages are kept from a CPU only")

    def weight_bytes(self, checkpoint: Checkpoint, config: EngineConfig) -> int:
        """Bytes of all weights as it holds them."""
        if self.name == "torch":
            keeps_4_bits = _torch_executor().keeps_4_bit_codes(self.device)
            return torch_weight_bytes(checkpoint, config, keeps_4_bits=keeps_4_bits)
        return weight_bytes(checkpoint, config)

    def available_bytes(self, machine: Machine) -> int:
        """Memory of the device."""
        if self.device == "cpu":
            return machine.available_bytes
        return _torch_executor().free_bytes(self.device)

    def load(
        self, checkpoint: Checkpoint, config: EngineConfig, *, num_pages: int, pages_of: Executor | None = None
    ) -> Executor:
        """The loaded executor; ``config`` must name threads and KV memory, which has ``num_pages`` pages. With
        ``pages_of`` it uses the pool of that one, which must be of this choice as well.

        Raises ``UnsupportedError`` where pages cannot be shared, and what loading raises.
        """
        if self.name == "torch":
            torch_executor = _torch_executor()
            if pages_of is not None and not isinstance(pages_of, torch_executor):
                raise UnsupportedError("only executors of one kind share their pages")
            return torch_executor.load(checkpoint, config, device=self.device, pages_of=pages_of)
        if self.name == "native":
            from paceline.executors.native import NativeExecutor

            if pages_of is not None and not isinstance(pages_of, NativeExecutor):
                raise UnsupportedError("only executors of one kind share their pages")
            return NativeExecutor.load(checkpoint, config, pages_of=pages_of)
        from paceline.executors.reference import ReferenceExecutor

        if pages_of is not None:
            raise UnsupportedError("the reference executor shares its pages with no other")
        return ReferenceExecutor.load(checkpoint, config, num_pages=min(num_pages, MAX_REFERENCE_PAGES))


def _torch_executor() -> type[TorchExecutor]:
    """Imported only here. Raises ``ParameterError`` where PyTorch is not installed."""
    try:
        from paceline.executors.torch.executor import TorchExecutor
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        allowed = "native or reference where PyTorch is not installed: pip install 'paceline[torch]'"
        raise ParameterError("executor", "torch", allowed) from error
    return TorchExecutor
