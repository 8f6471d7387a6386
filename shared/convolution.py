"""What merging (IOS, section 3.2) needs to know of a convolution; the importer reads it from ONNX nodes."""

from dataclasses import dataclass

MAX_ACTIVATION_TEXT = 256
"""Characters; what follows a convolution at more length is no activation, and is not described."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution over all channels, with weights of its own, and the pointwise work that follows it.

    `pads` are ONNX's: what is added before each axis, then what is added behind each; `auto_pad` is resolved.
    """

    kernel: tuple[int, ...]  # [num_axes], as all but pads
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]  # [2 * num_axes]
    activation: str = ""
    """What follows, as text: two with equal texts do the same to every channel. Empty: nothing follows."""

    @property
    def before(self) -> tuple[int, ...]:
        """Padding before each axis. [num_axes]"""
        return self.pads[: len(self.kernel)]

    @property
    def behind(self) -> tuple[int, ...]:
        """Padding behind each axis. [num_axes]"""
        return self.pads[len(self.kernel) :]

    def extents(self, input_extents: tuple[int, ...]) -> tuple[int, ...]:
        """The output's extent along each axis (ONNX's Conv, `floor`). [num_axes]"""
        return tuple(
            (extent + before + behind - dilation * (size - 1) - 1) // stride + 1
            for extent, before, behind, dilation, size, stride in zip(
                input_extents,
                self.before,
                self.behind,
                self.dilations,
                self.kernel,
                self.strides,
                strict=True,
            )
        )

    def problem(self, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> str:
        """Why it cannot turn a tensor of one shape into one of the other; empty if it can."""
        axes = len(self.kernel)
        if axes < 1 or {axes} != {len(self.strides), len(self.dilations)} or len(self.pads) != 2 * axes:
            return "its attributes differ in length"
        if min(*self.kernel, *self.strides, *self.dilations) < 1 or min(self.pads) < 0:
            return "an attribute is out of range"
        if len(input_shape) != axes + 2 or len(output_shape) != axes + 2:
            return "its tensors have another rank"
        if self.extents(input_shape[2:]) != output_shape[2:] or input_shape[0] != output_shape[0]:
            return "its output has another shape"
        return "" if len(self.activation) <= MAX_ACTIVATION_TEXT else "its activation is too long"
