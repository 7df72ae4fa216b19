"""What we change of a module in linalg, before IREE forms its device programs."""
