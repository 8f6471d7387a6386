"""What planner and agent both need: pure values and pure decisions, no sockets, threads or clocks."""
