"""How an agent and a planner reach a machine: packages, images, and what observes them."""
