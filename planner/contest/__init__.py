"""Rivals in one comparison: every policy as a plan on the same device, judged on the same arrivals.

`entrants` says who takes part, `judge` what a plan is worth, `contest` which of them is best so far, at any
time, and looks at the winner again on arrivals that did not choose it.
"""
