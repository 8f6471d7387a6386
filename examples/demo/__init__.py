"""The demo: planner, agent and three client processes on this machine, and the report of that run."""
