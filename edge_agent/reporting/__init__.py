"""What the agent says: telemetry, profiles and recordings for the planner, status and journal for people."""
