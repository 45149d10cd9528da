"""Run a rank's program: the engine, the transports, the virtual world, devices.

In: scheduled programs, bodies and constants. Out: what the programs return, or an error on every
rank.
"""
