"""GPG, TOP's policy that picks the endings of a combined block one after another (Lin et al. 2025, V-C).

`network` has the features and the forward pass over plain arrays (training is in
`stageloom.planner.learning.gpg`), `checkpoint` the bytes of a trained one, `choose` what becomes of its
action. numpy is imported by the functions that touch arrays.
"""
