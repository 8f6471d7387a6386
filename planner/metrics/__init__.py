"""The planner's metrics for Prometheus, which its API tells at `/metrics`."""
