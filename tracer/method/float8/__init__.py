"""Linear layers in float8: the formula, its operators, and where a traced method uses them.

In: calls of `torch.nn.functional.linear` in a method. Out: quantised tensors and their products.
"""
