"""Policies: when to re-plan, and what a policy sees when it is asked. Pure; both sides use it.

`queues` measures how far queues have diverged and keeps the samples that a policy reads, `trigger` says when
to re-plan, `plain` is the policy that has learned nothing.
"""
