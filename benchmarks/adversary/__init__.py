"""What a bad device, a bad application or a stranger can do to others: attacks, floods, pings, kills."""
