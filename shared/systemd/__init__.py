"""What both services need to live under systemd: the notify protocol and the installing of a unit."""
