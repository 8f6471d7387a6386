"""What operators cost on a device class: from measurements to the table that a search reads."""
