"""Where torch or openvino is not installed, as on a light agent, their executors' tests are not collected."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["torch", "onnx_cuda/test_slots.py"]
if not find_spec("openvino"):
    collect_ignore.append("openvino")
