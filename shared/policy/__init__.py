"""Policies: when to re-plan, and what a policy sees when it is asked. Pure; both sides use it.

`queues` measures how far queues have diverged, `samples` keeps the ring that a policy reads, `trigger` says
when, `plain` is the policy that has learned nothing.
"""
