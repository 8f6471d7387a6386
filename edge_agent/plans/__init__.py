"""The plan manager: which plan the engine process should run, and how to get there.

`manager` is its core and asks `pursuit`, `candidate`, `probation`, `trial_runner` and `supervisor`, all pure:
events and the time in, `actions` out. `shell` carries these out. `check` looks at a plan before anything else
does, `fallback` keeps the good plan before the present one, and `alone` is an agent's without a planner.
"""
