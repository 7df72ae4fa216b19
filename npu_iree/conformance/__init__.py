"""The suite that a target has to pass: PyTorch's own table of operators, through torch.compile."""
