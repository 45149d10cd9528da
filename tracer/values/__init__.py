"""What the rooms above speak of: specs and stand-ins of values, actors' state and pieces, plans.

In: Python values and actors. Out: their types, their memory and who shares it.
"""
