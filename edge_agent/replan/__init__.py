"""Re-planning as the device sees it: load and drift become alarms; without a planner they are answered here.

`load_watch` reads what the engine process says, `alarms` and `drift` judge it (pure), and `policy` answers
with the learned policy's plan or a plainer one. The lifecycle core decides whether a plan may run.
"""
