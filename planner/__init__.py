"""The planner: searches plans, keeps what the fleet measured, and tells devices what to run."""

from typing import Final

__version__: Final = "0.1.0"
