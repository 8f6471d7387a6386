"""The planner: searches plans, keeps what the fleet measured, and tells devices what to run."""
