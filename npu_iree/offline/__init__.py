"""Artifacts: compiled ahead, shipped, loaded and called where no compiler is installed."""
