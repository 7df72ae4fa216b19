"""What we change of device programs on their way to machine code, and of what calls them."""
