"""A plan's life on the device, from a desired value to last-known-good.

`core` decides. It keeps the durable state (`states`, written by `statefile`) and asks `manager` and
`pursuit`, which drive the engine process, for the next step. The rules are in `trials`, `local`, `probation`
and `trial_runner`. All of these are pure. `shell` carries out what they decide.
"""
