"""The twin: a device simulated by the engine's own core on a virtual clock (`docs/twin.md`)."""
