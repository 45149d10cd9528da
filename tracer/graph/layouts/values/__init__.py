"""Computations on pieces beside the ops of torch: types of sums, checks of ids."""
