"""Search: every scheduler that is not learned, the cost formulas they rank with, and plans made from both.

A scheduler is a pure function from a combined block's graph, its costs, the limits on stages and a budget to
a schedule; `registry` finds one by name and `compose` applies it to every combined block of a plan.
"""
