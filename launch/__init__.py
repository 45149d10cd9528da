"""The functions that users call, the world of ranks, the environment, and the command lines.

In: Python functions over actors, and a launcher's variables. Out: compiled steps that run.
"""
