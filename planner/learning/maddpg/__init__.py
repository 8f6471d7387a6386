"""Training of MADDPG (TOP, section V-B): docs/learning.md has the equations, our deviations and why.

`problem` says what is to be learned, `stored` makes one from the store, `work` is what a worker runs,
`replay` keeps transitions and their rewards, `learner` has the networks and equations 3 and 4, `candidates`
the best plan so far, `course` decides which work comes next, `train` runs a training.
"""
