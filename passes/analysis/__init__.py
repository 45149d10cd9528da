"""Facts about a module that several passes need.

In: a scheduled module. Out: which ops are done before an op starts, and when values are last used.
"""
