"""Questions about the device whose answers the executor's design rests on; each probe answers one."""
