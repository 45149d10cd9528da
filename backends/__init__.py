"""What runs a rank's program: the executor, the transports, the virtual world, devices.

In: scheduled programs, bodies and constants. Out: what the programs return, or an error on every
rank.
"""
