"""Tools and reasoning: what requests say of them, and how models write calls and thoughts."""
