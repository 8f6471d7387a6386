"""What a hostile peer does to a planner."""
