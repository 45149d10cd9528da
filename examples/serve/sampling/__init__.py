"""From logits to tokens, inside of the graph."""
