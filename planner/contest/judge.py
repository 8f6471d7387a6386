"""How much a plan is worth on a simulated device: the same arrivals for every plan, from empty queues on."""

from collections.abc import Sequence
from dataclasses import dataclass

from stageloom.planner.contest.worth import Figures, Worth, figures_of, worth_of
from stageloom.planner.twin.window import MakeDevice, TargetDevice
from stageloom.shared.bound import BoundPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What every plan has to run: `windows` of `window_s` after `warm_up_s` that do not count."""

    seeds: tuple[int, ...]
    warm_up_s: float = 1.0
    window_s: float = 1.0
    windows: int = 10

    @property
    def simulated_s(self) -> float:
        """Seconds of the device for one plan."""
        return len(self.seeds) * (self.warm_up_s + self.window_s * self.windows)


def judge(bound: BoundPlan, make_device: MakeDevice, course: Course, service_s: Sequence[float]) -> Worth:
    """The worth of one plan that stays."""
    return worth_of([_figures(bound, make_device(seed), course, service_s) for seed in course.seeds])


def _figures(bound: BoundPlan, device: TargetDevice, course: Course, service_s: Sequence[float]) -> Figures:
    device.deploy(bound)
    device.run(course.warm_up_s)
    return figures_of([device.run(course.window_s) for _ in range(course.windows)], service_s)
