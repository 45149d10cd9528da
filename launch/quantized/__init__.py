"""Linear layers whose weights stay quantized, as folders of other libraries have them."""
