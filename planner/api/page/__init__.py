"""The fleet in a browser: pages that the planner renders, and the few buttons on them."""
