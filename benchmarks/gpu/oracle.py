"""Baseline 9: onnxruntime on the CPU says whether torch's reference is right; optional."""

from importlib.util import find_spec

from benchmarks.gpu.networks import Subject


def onnxruntime_error(subject: Subject) -> tuple[float, str]:
    """Relative difference of onnxruntime's logits from the reference, or why there is none."""
    if find_spec("onnxruntime") is None:
        return 0.0, "onnxruntime is not installed"
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        subject.artifact.onnx_bytes(), options, providers=["CPUExecutionProvider"]
    )
    (logits,) = session.run(None, {session.get_inputs()[0].name: subject.image})
    return subject.error_of(logits), ""
