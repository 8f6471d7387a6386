"""Training of the learned policies; the only part of the planner that imports torch."""
