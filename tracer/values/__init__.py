"""The data that all of the tracer uses: specs and stand-ins of values, actors' state, plans.

In: Python values and actors. Out: their types, their memory and who shares it.
"""
