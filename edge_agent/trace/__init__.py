"""Traces of the running engine: recorded by the engine process, joined with the plan, written for viewers.

`timeline` says what ran where and what the plan expected, `chrome` writes that in the Chrome event format,
and `command` is `stageloom-agent trace`.
"""
