"""Why a node cannot be lowered. Both are caught inside the package: such an operator runs in onnxruntime."""


class Unsupported(Exception):
    """This node is not lowered to torch; the text says what is missing, in a few words."""


class NeedsConstant(Unsupported):
    """A value that decides a shape is computed at run time; shapes here are static."""

    def __init__(self, kind: str, value: str) -> None:
        self.value = value
        super().__init__(f"{kind}: {value!r} decides a shape and is known only while running")
