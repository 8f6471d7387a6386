"""`onnx_cuda` as the registry makes it."""

from stageloom.edge_agent.executor.onnx_cuda.cuda import CudaOrtDevice
from stageloom.edge_agent.executor.onnx_cuda.executor import OnnxDeviceExecutor


class OnnxCudaExecutor(OnnxDeviceExecutor):
    """onnxruntime's CUDA kernels on the current device."""

    def __init__(self) -> None:
        """Raises:
        ExecutorError: this process cannot run sessions on CUDA; nothing takes the device's place.
        """
        super().__init__(CudaOrtDevice())
