"""`torch_cuda` with its graphs handed out, so that they run on what lies in the plan's buffers."""

from collections.abc import Callable
from typing import Any, Final

from stageloom.edge_agent.executor.cuda.device import GraphDevice
from stageloom.edge_agent.executor.torch.builder import Effort
from stageloom.edge_agent.executor.torch.cuda import CudaGraphDevice
from stageloom.edge_agent.executor.torch.executor import TorchCudaExecutor
from stageloom.shared.engine.steps import ProgramKey

_GRAPH_BYTES: Final = 24 << 30
_EFFORT: Final = Effort(form_rounds=0)


class ResidentExecutor(TorchCudaExecutor):
    """Every schedule keeps its own form, so that a row measures what it names; no graph is given up."""

    def __init__(self, device: GraphDevice | None = None) -> None:
        """
        Raises:
            ExecutorError: there is no CUDA device.
        """
        super().__init__(device or CudaGraphDevice(), effort=_EFFORT, graph_bytes=_GRAPH_BYTES)

    def replay(self, program: ProgramKey) -> Callable[[], None] | None:
        """Launches a prepared program's graph on torch's current stream; None where it was not captured."""
        graph: Any = self._built[program].graph  # torch's own
        if graph is None:
            return None
        launch: Callable[[], None] = graph.replay
        return launch

    def streams_of(self, program: ProgramKey) -> int:
        """How many streams the program runs on."""
        return self._built[program].program.recipe.streams
