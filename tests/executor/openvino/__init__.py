"""The `openvino` executor."""
