"""Attention with a function of scores and a function of a mask, as torch's `flex_attention`."""
