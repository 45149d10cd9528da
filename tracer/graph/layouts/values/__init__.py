"""What ranks compute of pieces beside the ops of torch: types of sums, checks of ids."""
