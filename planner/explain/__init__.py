"""Why a device runs what it runs: schedules in words, their costs and sources, and what else was tried."""
