"""Rival policies compared: each as a plan on the same simulated device, under the same arrivals.

`candidates` lists who takes part, `refinement` draws neighbours of the best plan, `evaluator` simulates one
plan and `score` compares two. `tournament` holds the best plan so far at any time, and has the winner
evaluated again on arrivals that did not choose it; `runner` drives it with a pool of workers.
"""
