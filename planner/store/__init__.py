"""What the planner remembers: the only package, beside `migrations`, that knows SQL."""
