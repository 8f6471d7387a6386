"""`torch_cuda` as the registry makes it."""

from stageloom.edge_agent.executor.torch.cuda import CudaDevice
from stageloom.edge_agent.executor.torch.graphs import TorchGraphExecutor


class TorchCudaExecutor(TorchGraphExecutor):
    """Programs as CUDA graphs on the current device, channels last."""

    def __init__(self) -> None:
        """Raises:
        ExecutorError: this process has no CUDA device.
        """
        super().__init__(CudaDevice())
