"""Run a step's Python over values without elements, and record the calls that it makes.

In: the user's function, and the arguments of a call. Out: a `Trace`: a module in the phase
`traced`, with the bodies of its functions and the pytrees of its arguments and results.
"""
