"""Where searches run: never on a thread that serves. The only place that imports Ray, and only when asked."""
