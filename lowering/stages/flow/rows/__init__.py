"""Device programs that compute row by row: read, joined, and written such that a row stays near."""
