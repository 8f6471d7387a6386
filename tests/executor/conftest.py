"""Where torch is not installed, as on a light agent, its executors' tests are not collected."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["torch", "onnx_cuda/test_slots.py"]
