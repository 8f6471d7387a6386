"""The re-planner: what the planner does about an alarm.

`settings` per device, `observation` what a policy sees, `policy` what it proposes, `predict` what plans cost
under a load, `decide` the choice among proposals, `service` the thread that carries it out. All but the last
are pure.
"""
