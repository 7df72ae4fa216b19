"""The compiler half: a functional ATen graph in, a plan and artifacts out; opens no device."""
