"""The benchmark suite: models times backends, each pair in processes of its own."""
