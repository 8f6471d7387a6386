"""What this machine is and what it lacks: device class, installed backends, the checks of `doctor`."""
