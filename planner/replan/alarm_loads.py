"""The loads of an alarm, as policies take them. Pure."""

from stageloom.shared.messages.control import Alarm, UsualLoad
from stageloom.shared.policy.plain import Load


def loads_of(alarm: Alarm) -> tuple[Load, ...]:
    """What an alarm says of its device's models; older agents do not say what is usual."""
    usual = alarm.usual or ()
    unknown = [UsualLoad(0.0, 0)] * (len(alarm.loads) - len(usual))
    return tuple(
        Load(
            model=load.model,
            arrivals_per_s=max(load.arrivals_per_s, 0.0),
            service_s=max(load.service_us, 0.0) / 1e6,
            queued=load.queued,
            oldest_age_s=load.oldest_age_us / 1e6,
            usual_per_s=max(long.arrivals_per_s, 0.0),
            deadline_s=long.deadline_us / 1e6,
        )
        for load, long in zip(alarm.loads, [*usual, *unknown], strict=False)
    )
