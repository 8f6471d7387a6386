"""Training of MADDPG (TOP, section V-B): docs/learning.md has the equations, our deviations and why.

`problem` says what is to be learned, `twins` on what, `schedules` keeps stage_dict, `environment` is
one step, `work` what a worker is asked for, `rewards` and `replay` what the learner keeps, `networks` and
`learner` equations 3 and 4, `candidates` the best plan so far, `course` which work comes next, `train` the
loop in one process.
"""
