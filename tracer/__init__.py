"""From Python to IR: steps are recorded as ops, methods are traced to torch.fx graphs."""
