"""How busy the machine is, at which clocks, in which power mode; `chain` puts the sources together.

Every value is a number that was read or None: a source that cannot tell never says 0.
"""
