"""Ways to serve some models on this machine, compared under one load: what a user would do, and Stageloom.

Each contestant lives in a process of its own and gets the same arrivals, in windows of a few seconds that
take turns. Its capacity is the largest Poisson rate at which each model's tasks meet their deadlines.
"""

from typing import Final

MOST_SECONDS: Final = 36_000
"""That one comparison may take."""
