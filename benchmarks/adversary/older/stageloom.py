"""Found first on the path of 0.1.0: its packages under the names that later versions gave them."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__path__: list[str] = []  # what makes a module a package


class _Renamed(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.startswith("stageloom.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(spec.name.removeprefix("stageloom."))

    def exec_module(self, module: ModuleType) -> None:
        """It ran under its own name."""


def __getattr__(name: str) -> Any:
    if name == "Client":
        return importlib.import_module("edge_agent").Client
    raise AttributeError(name)


sys.meta_path.insert(0, _Renamed())
