"""The re-planner: what the planner does about an alarm.

`policy` has the observation and the plain policy, `learned` what a trained one adds, `predict` what plans
cost under a load, `decide` the choice among proposals, `backoff` when to search again: those are pure.
`observing` reads the store for them. `service` is the thread that carries a re-plan out, `background`
searches while no re-plan waits.
"""
