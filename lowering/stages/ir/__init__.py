"""How what we change is found and written: values, ops, and device programs in MLIR."""
