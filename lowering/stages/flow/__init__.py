"""What we change of a module in flow, when its device programs are formed."""
