"""Re-planning as the device sees it: load and drift become alarms; without a planner they are answered here.

`load_watch` reads what the engine process says, `alarms` and `drift` judge it (pure), and `local_planner`
answers with the learned `policy`'s plan or a plainer one.
"""
