"""All probes, each a row of its own."""

import time
from collections.abc import Sequence
from statistics import median

from benchmarks.gpu.ceilings import smallest
from benchmarks.gpu.device import Device
from benchmarks.gpu.networks import Subject
from benchmarks.gpu.probes import graphs, kernels, streams
from benchmarks.gpu.results import Deadline, Results
from benchmarks.gpu.settings import Settings

_PART = "probe"
_KERNELS_SHARE = 0.06  # of the time left
_CONCATENATIONS = {
    # branches' channels, channels read, side: SqueezeNet's last fire module, Inception's first mixed block
    "squeezenet fire9": ((256, 256), 64, 13),
    "inception mixed_5b": ((64, 64, 96, 32), 192, 25),
}


class Probes:
    """Runs them one by one; one that fails says why."""

    def __init__(
        self,
        device: Device,
        subjects: Sequence[Subject],
        settings: Settings,
        results: Results,
        deadline: Deadline,
    ) -> None:
        self._device = device
        self._subjects = subjects
        self._settings = settings
        self._results = results
        self._deadline = deadline
        self._seconds = 0.01 if settings.quick else 0.1

    def run(self) -> None:
        """All."""
        for name, probe in (
            ("the 33rd stream", self._alias),
            ("connections", self._connections),
            ("fused and unfused convolutions", self._fused),
            ("concatenation in place", self._concat),
            ("child graphs", self._children),
            ("conditional nodes", self._conditions),
        ):
            with self._results.attempt(_PART, name):
                probe()

    def _alias(self) -> None:
        if self._device.kind != "cuda":
            self._results.skip(_PART, "the 33rd stream", "needs CUDA")
            return
        number = streams.first_alias(self._device)
        self._results.add(
            {"probe.first_alias_stream": None if number is None else float(number)},
            part=_PART,
            name="the 33rd stream",
            first_alias=number,
        )

    def _connections(self) -> None:
        if self._device.kind != "cuda" or not self._settings.children:
            self._results.skip(_PART, "connections", "needs CUDA and child processes")
            return
        for connections in streams.COUNTS:
            found = streams.with_connections(self._device.kind, connections)
            self._results.add(
                {f"probe.chains_at_once.{connections}.{how}": at_once for how, at_once in found.items()},
                part=_PART,
                name=f"{connections} connections, 16 streams: chains at once",
                **found,
            )

    def _fused(self) -> None:
        """Every shape of the models while the time lasts, the most frequent first."""
        networks = [one.network(self._device.torch, self._settings.precision) for one in self._subjects]
        shapes = sorted(kernels.convolutions(self._subjects, networks).items(), key=lambda one: -one[1])
        if self._settings.quick:
            shapes = shapes[:3]
        ends_s = time.monotonic() + self._deadline.share_s(_KERNELS_SHARE)
        seconds = self._seconds / 10
        units: list[kernels.Unit] = []
        for shape, count in shapes:
            if time.monotonic() > ends_s and units:
                break
            units.append(kernels.both_ways(self._device, self._settings.precision, shape, count, seconds))
        slower = [unit for unit in units if unit.gain < 1.0]
        worst = min(units, key=lambda unit: unit.gain)
        best_us = sum(unit.count * min(unit.fused_us, unit.unfused_us) for unit in units)
        fused_us = sum(unit.count * unit.fused_us for unit in units)
        unfused_us = sum(unit.count * unit.unfused_us for unit in units)
        self._results.add(
            {
                "probe.fused_over_unfused": unfused_us / fused_us,
                "probe.chosen_over_fused": fused_us / best_us,
                "probe.fused_slower_shapes": float(len(slower)),
            },
            part=_PART,
            name="fused and unfused convolutions",
            shapes=len(units),
            of=len(shapes),
            fused_us=fused_us,
            unfused_us=unfused_us,
            chosen_us=best_us,
            median_gain=median(unit.gain for unit in units),
            fused_is_slower=len(slower),
            worst_gain=worst.gain,
            worst_shape=str(worst.shape),
        )

    def _concat(self) -> None:
        for name, (channels, reads, side) in _CONCATENATIONS.items():
            found = kernels.concat_ways(
                self._device,
                self._settings.precision,
                channels=channels,
                reads=reads,
                side=side,
                seconds=self._seconds,
            )
            self._results.add(
                {f"probe.concat.{name.split()[0]}.{way}_us": taken for way, taken in found.items()},
                part=_PART,
                name=f"concatenation of {name}, us",
                **found,
            )

    def _children(self) -> None:
        try:
            found = graphs.children(self._device, self._settings.precision, self._size(), self._seconds)
        except graphs.NoBindings as error:
            self._results.skip(_PART, "child graphs", str(error))
            return
        self._results.add(
            {"probe.child_graphs_at_once": found["in_turn"] / found["beside"]},
            part=_PART,
            name="4 child graphs, us",
            **found,
        )

    def _conditions(self) -> None:
        try:
            found = graphs.conditions(self._device, self._settings.precision, self._size(), self._seconds)
        except graphs.NoBindings as error:
            self._results.skip(_PART, "conditional nodes", str(error))
            return
        self._results.add(
            {"probe.condition_us": (found["holds"] - found["plain"]) / 4},
            part=_PART,
            name="4 members under conditions, us",
            **found,
        )

    def _size(self) -> tuple[int, int]:
        return smallest(self._subjects)
