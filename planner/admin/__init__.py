"""The operator's door: requests from the `stageloom` command to a running planner."""
