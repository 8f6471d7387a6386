"""`openvino`: sub-models of the ONNX file on OpenVINO's kernels for the processor.

`backend` imports the package without its telemetry, `model` reads a sub-model so that its weights stay in the
artifact's file, `session` runs one on the calling thread, `executor` refuses what would be computed wrongly.
"""
