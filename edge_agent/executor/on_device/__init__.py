"""What executors on a device with streams share, all of it pure: few streams, what has ended when, static
memory, and which results must be made aside."""
