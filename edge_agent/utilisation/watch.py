"""What the agent reports of its machine: telemetry rows, the power mode, the environment of measurements."""

from collections.abc import Callable, Iterable

from stageloom.edge_agent.machine.device import device_class
from stageloom.edge_agent.utilisation.chain import UtilisationChain
from stageloom.edge_agent.utilisation.reading import Metric
from stageloom.shared.messages.telemetry import RowData, Utilisation


class MachineWatch:
    """Looks when it is told to; in between it answers from the last look, so that asking costs nothing."""

    def __init__(
        self,
        chain: UtilisationChain,
        environment: Callable[[str], str] = lambda mode: device_class(mode=mode),
    ) -> None:
        self._chain = chain
        self._environment = environment
        self._known: set[str] = set()  # metrics that had a value once
        self._looked = False
        self.power_mode = chain.power_mode()

    def look(self) -> list[RowData]:
        """Read the machine. What it has never told is reported once as unsupported and then left out."""
        self._look_at_mode()
        metrics = self._chain.read()
        self._known |= {metric.name for metric in metrics if metric.value is not None}
        rows = _rows(one for one in metrics if one.name in self._known or not self._looked)
        self._looked = True
        return rows

    def clocks(self) -> list[RowData]:
        """Clocks and power limit as they are now, to stand beside a profile."""
        return _rows(one for one in self._chain.clocks() if one.value is not None)

    def environment(self) -> str:
        """The device class in the power mode of now: what a profile of now is filed under."""
        self._look_at_mode()
        return self._environment(self.power_mode)

    def _look_at_mode(self) -> None:
        """A mode that cannot be read just now has not changed: a change makes the agent plan anew."""
        self.power_mode = self._chain.power_mode() or self.power_mode


def _rows(metrics: Iterable[Metric]) -> list[RowData]:
    return [Utilisation(metric.name, metric.value, metric.unit) for metric in metrics]
