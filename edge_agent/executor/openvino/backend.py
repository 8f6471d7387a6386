"""OpenVINO's package, imported without its telemetry.

`import openvino` imports `openvino.tools.ovc`, a model converter, which makes a file with an identity in the
user's home and reports the import to a server from a thread of its own. The package goes without the
converter where that cannot be imported, and a process that does not has 15 MiB less resident.
"""

import sys
from importlib import import_module
from typing import Any, Final

_CONVERTER: Final = "openvino.tools.ovc"
_TELEMETRY: Final = "openvino_telemetry"


def import_quietly() -> Any:
    """The package `openvino`.

    Telemetry stays off for the life of the process; the converter can be imported afterwards. Where the
    application has imported `openvino` itself, what that started is left alone.

    Raises:
        ImportError: it is not installed, or its libraries do not load.
    """
    if "openvino" in sys.modules:
        return sys.modules["openvino"]
    absent: Any = None  # None in sys.modules makes an import fail
    sys.modules.setdefault(_TELEMETRY, absent)
    hidden = sys.modules.setdefault(_CONVERTER, absent) is None
    try:
        return import_module("openvino")
    finally:
        if hidden:
            del sys.modules[_CONVERTER]
