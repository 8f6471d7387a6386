"""What the commands print for people."""

from collections.abc import Sequence

from stageloom.edge_agent.machine.doctor import Check
from stageloom.edge_agent.reporting.status import AgentStatus, TrialStatus
from stageloom.shared.text import counted


def status_text(status: AgentStatus) -> str:
    """A few lines; those without content are left out."""
    engine, link = status.engine, status.link
    lines = [
        f"ready      {'yes' if status.ready else 'no: ' + status.reason}",
        f"agent      {status.version}, process {status.pid}, up {status.uptime_s:.0f} s, home {status.home}",
        f"engine     {f'process {engine.pid}' if engine.pid else 'not running'}, {engine.restarts} restarts"
        + (f", last ended with {engine.last_exit}" if engine.last_exit else ""),
    ]
    if status.plan:
        plan = status.plan
        lines.append(f"plan       {plan.digest[:12]} from {plan.origin}, models {', '.join(plan.models)}")
    else:
        lines.append("plan       none")
    if status.trial:
        lines.append(f"trial      {_trial_text(status.trial)}")
    if status.last_pause_ms is not None:
        lines.append(f"pause      {status.last_pause_ms:.0f} ms at the last swap: both plans did not fit")
    lines.append(f"link       {link.state}" + (f": {link.detail}" if link.detail else ""))
    if link.device:
        lines.append(f"device     {link.device}")
    if link.desired:
        reason = f" ({link.reason})" if link.reason else ""
        lines.append(f"desired    generation {link.desired}, {link.desired_state}{reason}")
    if status.policy:
        policy = status.policy
        says = f": has no say, {policy.refused}" if policy.refused else ", plans where no planner answers"
        lines.append(f"policy     {policy.digest[:12]}{says}")
    lines += [f"queue      {q.model}: {q.tasks} tasks, oldest {q.oldest_age_s:.3f} s" for q in status.queues]
    lines += [
        f"tasks      {t.model}: {t.submitted} submitted, {t.completed} completed, {t.refused} refused, "
        f"{t.failed} failed, {t.cancelled} cancelled, {t.expired} expired, {t.open} open"
        for t in status.tasks
    ]
    lines += [f"problem    {problem}" for problem in status.problems]
    return "\n".join(lines)


def _trial_text(trial: TrialStatus) -> str:
    if trial.phase != "trial":
        return f"the desired plan is {trial.phase}"
    ratio = f", ratio so far {trial.ratio:.3f}" if trial.ratio is not None else ""
    pairs = counted(trial.pairs, "pair")
    return f"{pairs} of windows{ratio}, decided within {trial.seconds_left:.0f} s"


def doctor_text(checks: Sequence[Check]) -> str:
    """One line per check, the remedy below those that need one."""
    lines = []
    for check in checks:
        lines.append(f"{check.result:5} {check.name}: {check.detail}")
        if check.remedy:
            lines.append(f"      -> {check.remedy}")
    return "\n".join(lines)
