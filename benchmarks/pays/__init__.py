"""Whether re-planning pays: the loop under loads that change, and the plans that it found beside others."""
