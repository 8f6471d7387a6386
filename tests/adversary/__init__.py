"""A bad device, or a stranger, beside a good device: what one does must not be noticed by the other."""
