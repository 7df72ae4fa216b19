"""What `measure_capabilities.py` is made of: find single ops, try each one, write the table."""
