"""MADDPG, TOP's policy that sets launch intervals and combines blocks (Lin et al. 2025, section V-B).

`space` says what a policy decides over and whom it belongs to, `actions` what its actions mean, `network`
what it sees and the forward pass over plain arrays (training is in `stageloom.planner.learning.maddpg`),
`checkpoint` the bytes of a trained one with its schedules, and `decide` goes from samples to a plan. numpy is
imported by the functions that touch arrays.
"""
