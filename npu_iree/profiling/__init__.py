"""Where the time of an artifact's calls goes, by what IREE's tools record of its device programs."""
