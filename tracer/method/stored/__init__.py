"""Write a traced method as text, and read it in another process.

In: the graph of a method, and the torch functions that it has used. Out: JSON, and these again.
Reading executes nothing: names are looked up in tables of torch's functions and operators.
"""
