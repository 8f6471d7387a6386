"""The re-planner: what the planner does about an alarm.

`settings` per device, `observation` what a policy sees, `policy` what it proposes and `learned` what a
trained one adds, `predict` what plans cost under a load, `decide` the choice among proposals: those are pure.
`observing` and `recalibration` read the store for them. `service` is the thread that carries a re-plan out,
`background` the one that searches while nobody waits.
"""
