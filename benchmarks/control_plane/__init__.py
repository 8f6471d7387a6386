"""A thousand devices on one planner process: heartbeats, telemetry, pushes, deaths, a kill."""
