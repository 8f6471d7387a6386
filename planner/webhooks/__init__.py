"""Messages about alarms and verdicts to addresses that asked for them."""
