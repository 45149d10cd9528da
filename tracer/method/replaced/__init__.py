"""Functions of torch that traced methods compute otherwise than torch does."""
